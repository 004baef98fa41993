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
        cert: PathBuf,
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

/// A certificate and key, read and found fit; or plaintext.
#[derive(Clone, Debug)]
pub struct TlsMaterial(Option<ServerTlsConfig>);

impl TlsMaterial {
    /// A server that is secured by it.
    pub(crate) fn secure(self, server: Server) -> Result<Server, tonic::transport::Error> {
        match self.0 {
            Some(config) => server.tls_config(config),
            None => Ok(server),
        }
    }
}

impl Tls {
    /// Reads or makes what the transport needs. ALPN offers `h2` alone.
    ///
    /// # Errors
    /// When a file cannot be read, its content does not fit, or no certificate can be made.
    pub fn material(&self) -> Result<TlsMaterial, TlsError> {
        let identity = match self {
            Tls::Plaintext => return Ok(TlsMaterial(None)),
            Tls::SelfSigned => {
                let names = ["sidestep", "localhost"].map(str::to_owned);
                let made = rcgen::generate_simple_self_signed(names)?;
                Identity::from_pem(made.cert.pem(), made.signing_key.serialize_pem())
            }
            Tls::Files { cert, key } => Identity::from_pem(read(cert)?, read(key)?),
        };
        let material = TlsMaterial(Some(ServerTlsConfig::new().identity(identity)));
        // A trial, so that files that do not fit are found at start and not at the first connection.
        material
            .clone()
            .secure(Server::builder())
            .map_err(TlsError::Unfit)?;
        Ok(material)
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

    fn files(cert: &str, key: &str) -> Result<TlsMaterial, TlsError> {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str, content: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, content).unwrap();
            path
        };
        let tls = Tls::Files {
            cert: path("tls.crt", cert),
            key: path("tls.key", key),
        };
        tls.material()
    }

    #[test]
    fn a_missing_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let cert = dir.path().join("absent.pem");
        let tls = Tls::Files {
            cert: cert.clone(),
            key: cert,
        };
        let error = tls.material().unwrap_err().to_string();
        assert!(error.contains("absent.pem"), "{error}");
    }

    #[test]
    fn files_that_are_no_certificate_or_do_not_fit_are_found_at_start() {
        let make = || rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let (one, other) = (make(), make());
        let key = one.signing_key.serialize_pem();
        assert!(files(&one.cert.pem(), &key).is_ok());
        for (cert, key) in [
            (other.cert.pem(), key.clone()),
            ("no certificate".to_owned(), key),
            (one.cert.pem(), "no key".to_owned()),
        ] {
            let error = files(&cert, &key).unwrap_err();
            assert!(matches!(error, TlsError::Unfit(_)), "{error}");
        }
    }

    #[test]
    fn plaintext_is_only_what_was_asked_for() {
        assert!(Tls::Plaintext.material().unwrap().0.is_none());
        assert!(Tls::default().material().unwrap().0.is_some());
    }
}
