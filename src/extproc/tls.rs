//! Transport security of the gRPC port.
//!
//! Lives here: the three ways to secure it.
//! Never here: who may connect; gateways are told apart by the network.
//! Invariant: a certificate that cannot be read stops the start; there is no fallback to plaintext.

use std::path::PathBuf;
use tonic::transport::{Identity, ServerTlsConfig};

/// How the port is secured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Tls {
    /// TLS with a certificate made at start: for gateways that do not verify it, which is what the
    /// endpoint picker protocol asks of them.
    #[default]
    SelfSigned,
    /// TLS with a certificate chain and key from PEM files, read at start.
    Files {
        /// The certificate chain.
        certificate: PathBuf,
        /// Its private key.
        key: PathBuf,
    },
    /// HTTP/2 without TLS.
    Plaintext,
}

/// Why the port cannot be secured.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("tls file {path}: expected a readable PEM file, found {source}")]
    File {
        /// Its path.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// No certificate could be made.
    #[error("self-signed certificate: {0}")]
    SelfSigned(#[from] rcgen::Error),
}

impl Tls {
    /// The transport's configuration; `None` for plaintext. ALPN offers `h2` alone.
    ///
    /// # Errors
    /// When a file cannot be read or no certificate can be made.
    pub fn config(&self) -> Result<Option<ServerTlsConfig>, TlsError> {
        let identity = match self {
            Tls::Plaintext => return Ok(None),
            Tls::SelfSigned => {
                let names = ["sidestep", "localhost"].map(str::to_owned);
                let made = rcgen::generate_simple_self_signed(names)?;
                Identity::from_pem(made.cert.pem(), made.signing_key.serialize_pem())
            }
            Tls::Files { certificate, key } => Identity::from_pem(read(certificate)?, read(key)?),
        };
        Ok(Some(ServerTlsConfig::new().identity(identity)))
    }
}

fn read(path: &PathBuf) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|source| TlsError::File {
        path: path.clone(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let certificate = dir.path().join("absent.pem");
        let tls = Tls::Files {
            certificate: certificate.clone(),
            key: certificate,
        };
        let error = tls.config().unwrap_err().to_string();
        assert!(error.contains("absent.pem"), "{error}");
    }

    #[test]
    fn plaintext_is_only_what_was_asked_for() {
        assert!(Tls::Plaintext.config().unwrap().is_none());
        assert!(Tls::default().config().unwrap().is_some());
    }
}
