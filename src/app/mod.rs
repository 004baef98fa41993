//! The program put together: files to parts, parts to ports and tasks.
//!
//! Lives here: construction, wiring, start and stop.
//! Never here: rules of any kind.
//! Invariant: [`App::start`] has bound every port and read every file before it returns, so a fault
//! is found before the first request; every task ends with the [`App`].

mod attend;
mod collect;
mod kubernetes;
mod models;
mod policies;
mod prerequisites;
mod reload;
mod shadow;
mod standing;
mod status;

pub use crate::fleet::kubernetes::rights;

use crate::admin::Admin;
use crate::admin::access::{Access, Token, TokenError};
use crate::app::standing::Standing;
use crate::config::{
    AdminAccess, Explain, Handoff, Loaded, LoadedPolicy, PodSource, PolicySource, Process,
    Protocol, Tls,
};
use crate::extproc::conformance::Conformance;
use crate::extproc::counters::Counters;
use crate::extproc::server::{self, Settings};
use crate::extproc::wire::MetadataKeys;
use crate::fleet::Roster;
use crate::fleet::kubernetes::{Cluster, ConnectError};
use crate::kv::index::Index;
use crate::load::Ledger;
use crate::observe::{Observer, Sources};
use crate::pick::{ExplainLimits, Explainer, InForce, Parts, Picker};
use crate::route::Dialect;
use crate::telemetry::journal::Journal;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::trace::settings::{self, FileSettings};
use crate::telemetry::trace::{TraceError, Tracing};
use crate::units::{BlockSize, Ratio};
use attend::Attendant;
use kubernetes::PolicyKnown;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::service::Routes;

/// Decisions kept for the admin port: about 12 MiB, and 16 s at 500 decisions a second.
const JOURNAL: usize = 8192;
/// How often watched files are looked at.
const WATCH_EVERY: Duration = Duration::from_millis(500);

/// The program could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A port could not be bound.
    #[error("{what}: expected a free address, found {address}: {cause}")]
    Bind {
        /// The setting.
        what: &'static str,
        /// Its value.
        address: SocketAddr,
        /// Why not.
        cause: std::io::Error,
    },
    /// A model's files could not be used.
    #[error(transparent)]
    Model(#[from] models::ModelError),
    /// The admin token could not be read.
    #[error("admin.token: {}: {cause}", path.display())]
    AdminToken {
        /// Its file.
        path: std::path::PathBuf,
        /// Why not.
        cause: TokenFault,
    },
    /// The trace exporter could not be set up.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// No cluster could be found.
    #[error(transparent)]
    Cluster(#[from] ConnectError),
    /// The certificate could not be used.
    #[error(transparent)]
    Server(#[from] server::ServerError),
}

/// Why an admin token could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TokenFault {
    /// The file cannot be read.
    #[error("expected a file that can be read, found {0}")]
    File(#[from] std::io::Error),
    /// What is in it is no token.
    #[error(transparent)]
    Token(#[from] TokenError),
}

/// The ports that were bound.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// Envoy's external-processing stream.
    pub ext_proc: SocketAddr,
    /// gRPC health.
    pub health: SocketAddr,
    /// Admin HTTP.
    pub admin: SocketAddr,
}

/// A picker with its ports and tasks.
#[derive(Debug)]
pub struct App {
    picker: Arc<Picker>,
    process: Process,
    bound: Bound,
    ext_proc: TcpListener,
    health: TcpListener,
    admin: TcpListener,
    access: Access,
    tls: server::TlsMaterial,
    counters: Arc<Counters>,
    tasks: JoinSet<()>,
}

impl App {
    /// Builds everything and binds the ports.
    ///
    /// # Errors
    /// When a file that the config names cannot be used, or a port cannot be bound.
    pub async fn start(loaded: Loaded) -> Result<App, StartError> {
        let process = loaded.process;
        let ext_proc = bind("listen.extProc", process.listen.ext_proc).await?;
        let health = bind("listen.health", process.listen.health).await?;
        let admin = bind("listen.admin", process.listen.admin).await?;
        let bound = Bound {
            ext_proc: local(&ext_proc, process.listen.ext_proc),
            health: local(&health, process.listen.health),
            admin: local(&admin, process.listen.admin),
        };
        let tls = server::tls_material(&tls(&process.tls))?;
        let access = access(&process.admin.access)?;

        let roster = Arc::new(Roster::new());
        let index = Arc::new(Index::new(crate::kv::index::Limits {
            blocks: process.index.max_blocks,
            blocks_per_pod: process.index.max_blocks_per_pod,
        }));
        let sources = Arc::new(Sources::default());
        let ledger = Ledger::default();
        let metrics = Metrics::new();
        let counters = Arc::new(Counters::default());
        let default_block_size = loaded
            .models
            .iter()
            .find_map(|model| model.block_size)
            .unwrap_or(BlockSize::DEFAULT);
        let picker = Arc::new(Picker::new(Parts {
            encoder: models::encoder(&loaded.models)?,
            observer: Observer::new(
                Arc::clone(&roster),
                Arc::clone(&index),
                Arc::clone(&sources),
                default_block_size,
            ),
            ledger: ledger.clone(),
            in_force: InForce {
                policy: loaded.policy,
                dialect: dialect(loaded.handoff),
            },
            metrics: metrics.clone(),
            tracing: tracing_of(&process)?,
            journal: Journal::new(JOURNAL),
        }));
        metrics.register_collector(Box::new(collect::State {
            picker: Arc::downgrade(&picker),
            counters: Arc::clone(&counters),
        }));

        metrics.register_collector(Box::new(kubernetes::Following(Arc::clone(&roster))));
        let in_cluster = matches!(process.pods, PodSource::Kubernetes(_))
            || matches!(process.policy, PolicySource::Kubernetes(_));
        let cluster = if in_cluster {
            Some(Cluster::find().await?)
        } else {
            None
        };
        let watches = Arc::clone(roster.watches());
        let (policy_known, knows_policy) = watch::channel(match process.policy {
            PolicySource::Kubernetes(_) => PolicyKnown::NotYet,
            PolicySource::Inline | PolicySource::File(_) => PolicyKnown::Yes,
        });

        let shadow = shadow::put(&loaded.shadow, &picker, &metrics);
        let (ask_shadow, asked_shadow) = watch::channel(loaded.shadow.clone());
        let policy = LoadedPolicy {
            policy: picker.in_force().policy.clone(),
            handoff: loaded.handoff,
            shadow: loaded.shadow,
            target: None,
            warnings: Vec::new(),
            content: loaded.policy_content,
        };
        let standing = Standing::new(
            &picker,
            policy,
            (loaded.pods.clone(), loaded.models.clone()),
        );
        let mut attendant = Attendant::new(roster, index, sources, ledger);
        attendant.apply(loaded.pods);
        let mut tasks = JoinSet::new();
        match (&process.pods, &cluster) {
            (PodSource::Kubernetes(discovery), Some(cluster)) => {
                let discovery = (**discovery).clone();
                let cluster = cluster.clone();
                let standing = match process.policy {
                    PolicySource::Kubernetes(_) => None,
                    PolicySource::Inline | PolicySource::File(_) => Some(standing.clone()),
                };
                let to = (attendant, standing);
                tasks.spawn(kubernetes::pods(cluster, discovery, to, knows_policy))
            }
            (PodSource::Inline | PodSource::Kubernetes(_), _) => tasks.spawn(attendant.stay()),
            (PodSource::File(path), _) => {
                let watch =
                    crate::config::watch::pods(path.clone(), WATCH_EVERY, loaded.pods_content);
                tasks.spawn(reload::pods(
                    watch,
                    attendant,
                    metrics.clone(),
                    standing.clone(),
                ))
            }
        };
        match (&process.policy, cluster) {
            (PolicySource::Kubernetes(objects), Some(cluster)) => {
                let source = policies::Source {
                    cluster,
                    objects: objects.clone(),
                    models: loaded.models,
                    default: (*picker.in_force()).clone(),
                    watches,
                    picker: Arc::downgrade(&picker),
                };
                tasks.spawn(policies::policies(source, policy_known));
            }
            (PolicySource::Inline | PolicySource::Kubernetes(_), _) => {}
            (PolicySource::File(path), _) => {
                let watch =
                    crate::config::watch::policy(path.clone(), WATCH_EVERY, loaded.policy_content);
                let weak = Arc::downgrade(&picker);
                let put = (standing, ask_shadow);
                tasks.spawn(reload::policy(watch, weak, metrics.clone(), put));
            }
        }
        tasks.spawn(shadow::follow(
            asked_shadow,
            shadow,
            Arc::downgrade(&picker),
            metrics,
        ));
        tasks.spawn(prerequisites::watch(Arc::downgrade(&picker)));
        Ok(App {
            picker,
            process,
            bound,
            ext_proc,
            health,
            admin,
            access,
            tls,
            counters,
            tasks,
        })
    }

    /// The ports that were bound.
    #[must_use]
    pub fn bound(&self) -> Bound {
        self.bound
    }

    /// The picker.
    #[must_use]
    pub fn picker(&self) -> &Arc<Picker> {
        &self.picker
    }

    /// Serves until `stop` resolves, then drains: health turns to not serving, new streams are
    /// refused, running ones end or are cut when the drain time is over.
    ///
    /// # Errors
    /// When a listener fails.
    pub async fn run(mut self, stop: impl Future<Output = ()>) -> Result<(), server::ServerError> {
        tracing::info!(
            ext_proc = %self.bound.ext_proc, health = %self.bound.health, admin = %self.bound.admin,
            "serving"
        );
        let (draining, drain) = watch::channel(false);
        let (stopping, stopped) = watch::channel(false);
        let explainer = self.explainer();
        let further = match &explainer {
            Some(explainer) => Routes::new(crate::admin::grpc::service(Arc::clone(explainer))),
            None => Routes::default(),
        };
        self.tasks.spawn(server::serve_health_and(
            self.health,
            Arc::clone(&self.picker),
            drain.clone(),
            further,
            until(stopped.clone()),
        ));
        let admin = Admin {
            picker: Arc::clone(&self.picker),
            explainer,
            access: self.access,
            trace_link: self.process.admin.trace_link.clone(),
        };
        let admin = crate::admin::serve(self.admin, admin, until(stopped));
        self.tasks.spawn(async move {
            if let Err(error) = admin.await {
                tracing::error!(%error, "the admin port stopped");
            }
        });
        let settings = server_settings(&self.process, self.tls, Arc::clone(&self.counters));
        let serving = server::serve(
            self.ext_proc,
            Arc::clone(&self.picker),
            settings,
            until(drain),
        );
        tokio::pin!(serving);
        let result = tokio::select! {
            result = &mut serving => result,
            () = stop => {
                tracing::info!("draining");
                self.picker.drain();
                let _ = draining.send(true);
                serving.await
            }
        };
        let _ = stopping.send(true);
        self.tasks.shutdown().await;
        self.picker.tracing().shutdown().await;
        tracing::info!("stopped");
        result
    }
}

impl App {
    fn explainer(&self) -> Option<Arc<Explainer>> {
        let body = usize::try_from(self.process.limits.request_bytes).unwrap_or(usize::MAX);
        let limits = ExplainLimits::default();
        match self.process.admin.explain {
            Explain::Disabled => None,
            Explain::Enabled => Some(Arc::new(Explainer::new(
                Arc::clone(&self.picker),
                ExplainLimits {
                    body: limits.body.min(body),
                    ..limits
                },
            ))),
        }
    }
}

async fn bind(what: &'static str, address: SocketAddr) -> Result<TcpListener, StartError> {
    TcpListener::bind(address)
        .await
        .map_err(|cause| StartError::Bind {
            what,
            address,
            cause,
        })
}

fn local(listener: &TcpListener, asked: SocketAddr) -> SocketAddr {
    listener.local_addr().unwrap_or(asked)
}

/// Resolves when the flag is raised or its owner is gone.
async fn until(mut flag: watch::Receiver<bool>) {
    while !*flag.borrow_and_update() {
        if flag.changed().await.is_err() {
            return;
        }
    }
}

fn dialect(handoff: Handoff) -> Dialect {
    match handoff {
        Handoff::DecodeFirst => Dialect::DecodeFirst,
        Handoff::PrefillFirst => Dialect::PrefillFirst,
    }
}

fn access(access: &AdminAccess) -> Result<Access, StartError> {
    let AdminAccess::TokenFile(path) = access else {
        return Ok(Access::Loopback);
    };
    std::fs::read_to_string(path)
        .map_err(TokenFault::from)
        .and_then(|text| Ok(Token::parse(&text)?))
        .map(Access::Token)
        .map_err(|cause| StartError::AdminToken {
            path: path.clone(),
            cause,
        })
}

fn tls(tls: &Tls) -> server::Tls {
    match tls {
        Tls::SelfSigned => server::Tls::SelfSigned,
        Tls::Plaintext => server::Tls::Plaintext,
        Tls::Files { cert, key } => server::Tls::Files {
            cert: cert.clone(),
            key: key.clone(),
        },
    }
}

fn tracing_of(process: &Process) -> Result<Tracing, TraceError> {
    let text = |part: &Arc<str>| part.to_string();
    let telemetry = &process.telemetry;
    let file = FileSettings {
        endpoint: telemetry.endpoint.as_ref().map(text),
        protocol: telemetry.protocol.map(|protocol| match protocol {
            Protocol::Grpc => settings::Protocol::Grpc,
            Protocol::HttpProtobuf => settings::Protocol::HttpProtobuf,
        }),
        service_name: telemetry.service_name.as_ref().map(text),
        sample_ratio: telemetry.sample_ratio.map(Ratio::get),
        resource: telemetry
            .resource
            .iter()
            .map(|(key, value)| (text(key), text(value)))
            .collect(),
    };
    match settings::resolve(file, |name| std::env::var(name).ok())? {
        Some(settings) => Tracing::start(&settings),
        None => Ok(Tracing::Off),
    }
}

fn server_settings(
    process: &Process,
    tls: server::TlsMaterial,
    counters: Arc<Counters>,
) -> Settings {
    Settings {
        limits: limits(&process.limits),
        tls,
        metadata: MetadataKeys {
            subset_hint: key(&process.data_plane.subset_hint),
            destination: key(&process.data_plane.destination),
            served: key(&process.data_plane.served),
        },
        conformance: match process.data_plane.conformance {
            crate::config::Conformance::Disabled => Conformance::Disabled,
            crate::config::Conformance::Enabled => Conformance::Enabled,
        },
        counters,
    }
}

fn limits(limits: &crate::config::Limits) -> server::Limits {
    server::Limits {
        body: usize::try_from(limits.request_bytes).unwrap_or(usize::MAX),
        held_requests: usize::try_from(limits.in_flight).unwrap_or(usize::MAX),
        body_stall: limits.body_timeout,
        decision: limits.decision_timeout,
        drain: limits.drain_timeout,
        ..server::Limits::default()
    }
}

fn key(key: &crate::config::MetadataKey) -> server::MetadataKey {
    server::MetadataKey {
        namespace: Arc::clone(&key.namespace),
        key: Arc::clone(&key.key),
    }
}
