//! The connection to an API server.
//!
//! Lives here: [`Cluster`], which knows where the server is and who we are, and [`Trouble`], what a
//! request can come to.
//! Never here: which objects are asked for, retries (see `follow`).
//! Invariant: every request has a time limit, and every error names the verb and the resource.

use kube::config::{Config, KubeConfigOptions, Kubeconfig};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Longest wait for a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// Longest wait for an answer that is not a watch.
const ANSWER: Duration = Duration::from_secs(20);

/// An API server, and who we are to it.
#[derive(Clone)]
pub struct Cluster {
    client: kube::Client,
    namespace: Arc<str>,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster")
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}

/// No way to reach a cluster is known.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Neither a kubeconfig nor the environment of a pod.
    #[error("cluster: expected a kubeconfig or the environment of a pod, found neither: {0}")]
    Nowhere(String),
    /// What is configured cannot be used.
    #[error("cluster: expected a usable connection, found {0}")]
    Unusable(String),
}

/// What a request came to, if not to an answer.
#[derive(Debug, thiserror::Error)]
pub enum Trouble {
    /// The server refuses: a right is missing.
    #[error("{verb} {resource}: expected the right to do so, found none (403 Forbidden)")]
    Forbidden {
        /// What was asked.
        verb: &'static str,
        /// Of what.
        resource: &'static str,
    },
    /// The server knows no such kind, or no such object.
    #[error("{verb} {resource}: expected it to exist, found nothing (404 Not Found)")]
    NotFound {
        /// What was asked.
        verb: &'static str,
        /// Of what.
        resource: &'static str,
    },
    /// What we know is too old, or somebody else changed it first.
    #[error("{verb} {resource}: expected to know the newest state, found a newer one ({code})")]
    Outdated {
        /// What was asked.
        verb: &'static str,
        /// Of what.
        resource: &'static str,
        /// 409 or 410.
        code: u16,
    },
    /// The server refuses what was sent.
    #[error("{verb} {resource}: expected it to be accepted, found {code}: {message}")]
    Refused {
        /// What was asked.
        verb: &'static str,
        /// Of what.
        resource: &'static str,
        /// The HTTP status.
        code: u16,
        /// The server's words.
        message: String,
    },
    /// No answer, or one that cannot be read.
    #[error("{verb} {resource}: expected an answer, found {cause}")]
    Away {
        /// What was asked.
        verb: &'static str,
        /// Of what.
        resource: &'static str,
        /// What happened.
        cause: String,
    },
}

impl Trouble {
    /// What was asked: the verb, and of which resource.
    #[must_use]
    pub fn call(&self) -> (&'static str, &'static str) {
        match self {
            Trouble::Forbidden { verb, resource }
            | Trouble::NotFound { verb, resource }
            | Trouble::Outdated { verb, resource, .. }
            | Trouble::Refused { verb, resource, .. }
            | Trouble::Away { verb, resource, .. } => (verb, resource),
        }
    }

    /// A short word for a metric label.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Trouble::Forbidden { .. } => "forbidden",
            Trouble::NotFound { .. } => "not_found",
            Trouble::Outdated { .. } => "outdated",
            Trouble::Refused { .. } => "refused",
            Trouble::Away { .. } => "away",
        }
    }
}

/// What is asked, for errors.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub(super) verb: &'static str,
    pub(super) resource: &'static str,
}

impl Call {
    pub(super) fn failed(self, error: kube::Error) -> Trouble {
        let Call { verb, resource } = self;
        match error {
            kube::Error::Api(status) => self.refused(status.code, &status.message),
            other => Trouble::Away {
                verb,
                resource,
                cause: chain(&other),
            },
        }
    }

    pub(super) fn refused(self, code: u16, message: &str) -> Trouble {
        let Call { verb, resource } = self;
        match code {
            // 401: a token that is no longer taken; the client reads it anew from its file.
            403 => Trouble::Forbidden { verb, resource },
            404 => Trouble::NotFound { verb, resource },
            409 | 410 => Trouble::Outdated {
                verb,
                resource,
                code,
            },
            500.. => Trouble::Away {
                verb,
                resource,
                cause: format!("{code}: {message}"),
            },
            _ => Trouble::Refused {
                verb,
                resource,
                code,
                message: message.to_owned(),
            },
        }
    }

    pub(super) fn late(self) -> Trouble {
        let Call { verb, resource } = self;
        Trouble::Away {
            verb,
            resource,
            cause: "none in time".to_owned(),
        }
    }
}

/// One page of a list.
#[derive(Debug, Deserialize)]
pub(super) struct Page<T> {
    #[serde(default)]
    pub(super) metadata: PageMeta,
    pub(super) items: Vec<T>,
}

/// What a page says of itself.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct PageMeta {
    pub(super) resource_version: String,
    #[serde(rename = "continue")]
    pub(super) more: String,
}

impl Cluster {
    /// Finds the cluster: the kubeconfig that `KUBECONFIG` names, else the environment of a pod, else
    /// `~/.kube/config`.
    ///
    /// Must be called within a tokio runtime. Nothing is sent yet.
    ///
    /// # Errors
    /// When neither is there, or what is there cannot be used.
    pub async fn find() -> Result<Cluster, ConnectError> {
        let nowhere = |error: &dyn std::error::Error| ConnectError::Nowhere(chain(error));
        let mut config = if std::env::var_os("KUBECONFIG").is_none()
            && std::env::var_os("KUBERNETES_SERVICE_HOST").is_some()
        {
            Config::incluster().map_err(|error| nowhere(&error))?
        } else {
            let file = Kubeconfig::read().map_err(|error| nowhere(&error))?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                .await
                .map_err(|error| nowhere(&error))?
        };
        config.connect_timeout = Some(CONNECT);
        // Whoever asks knows best when to ask again.
        config.default_retry = false;
        let namespace = Arc::from(config.default_namespace.as_str());
        let client = kube::Client::try_from(config)
            .map_err(|error| ConnectError::Unusable(chain(&error)))?;
        Ok(Cluster { client, namespace })
    }

    /// The namespace that the program runs in.
    #[must_use]
    pub fn namespace(&self) -> &Arc<str> {
        &self.namespace
    }

    pub(super) fn client(&self) -> &kube::Client {
        &self.client
    }

    /// Sends a request and reads the whole answer.
    pub(super) async fn ask<T: DeserializeOwned>(
        &self,
        call: Call,
        request: Result<http::Request<Vec<u8>>, kube::core::request::Error>,
    ) -> Result<T, Trouble> {
        let request = request.map_err(|error| call.failed(kube::Error::BuildRequest(error)))?;
        match timeout(ANSWER, self.client.request::<T>(request)).await {
            Ok(answer) => answer.map_err(|error| call.failed(error)),
            Err(_) => Err(call.late()),
        }
    }
}

/// An error with its causes.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text.push_str(&format!(": {more}"));
        }
        cause = error.source();
    }
    text
}
