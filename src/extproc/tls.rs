//! Transport security of the gRPC port.
//!
//! Lives here: the three ways to secure it.
//! Never here: who may connect; gateways are told apart by the network.
//! Invariant: a certificate that cannot be read stops the start; there is no fallback to plaintext.

use std::path::PathBuf;
use tonic::transport::{Identity, Server, ServerTlsConfig};

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
    /// The files are readable, but no certificate and key that fit each other.
    #[error("tls: expected a certificate chain and its key in PEM form, found {0}")]
    Unfit(tonic::transport::Error),
}

impl Tls {
    /// The transport's configuration; `None` for plaintext. ALPN offers `h2` alone.
    ///
    /// # Errors
    /// When a file cannot be read, its content does not fit, or no certificate can be made.
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
        let config = ServerTlsConfig::new().identity(identity);
        // A trial, so that files that do not fit are found now and not at the first connection.
        Server::builder()
            .tls_config(config.clone())
            .map_err(TlsError::Unfit)?;
        Ok(Some(config))
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

    fn files(certificate: &str, key: &str) -> Result<(), TlsError> {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str, content: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, content).unwrap();
            path
        };
        let tls = Tls::Files {
            certificate: path("tls.crt", certificate),
            key: path("tls.key", key),
        };
        tls.config().map(|_| ())
    }

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
    fn files_that_are_no_certificate_or_do_not_fit_are_found_at_start() {
        let make = || rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let (one, other) = (make(), make());
        let key = one.signing_key.serialize_pem();
        files(&one.cert.pem(), &key).unwrap();
        for (certificate, key) in [
            (other.cert.pem(), key.clone()),
            ("no certificate".to_owned(), key),
            (one.cert.pem(), "no key".to_owned()),
        ] {
            let error = files(&certificate, &key).unwrap_err();
            assert!(matches!(error, TlsError::Unfit(_)), "{error}");
        }
    }

    #[test]
    fn plaintext_is_only_what_was_asked_for() {
        assert!(Tls::Plaintext.config().unwrap().is_none());
        assert!(Tls::default().config().unwrap().is_some());
    }
}
