//! Names of things: pods, endpoints, models, sessions, tenants.
//!
//! Lives here: identities that every layer shares.
//! Never here: what a pod is (`fleet`), what it holds (`kv`), what it carries (`load`).
//! Invariant: a [`PodId`] names one incarnation of one pod and is never reused; a pod that goes and
//! comes back has another id, so that late events and late releases cannot touch its successor.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

/// One incarnation of a pod: a dense slot, and the generation that tells its users apart.
///
/// Slots are reused (so that per-pod state can live in arrays), generations are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodId {
    /// Index into dense per-pod arrays.
    pub slot: u16,
    /// How many pods have held this slot before.
    pub generation: u32,
}

impl fmt::Display for PodId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.slot, self.generation)
    }
}

/// Where an engine listens. Displays as `ip:port`, IPv6 in brackets.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(transparent)]
pub struct Endpoint(pub SocketAddr);

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SocketAddr::V4(v4) = self.0 else {
            return self.0.fmt(f);
        };
        // Written several times per request, into headers and spans; the standard library formats the
        // five numbers one by one.
        let mut text = Ascii::default();
        for (place, octet) in v4.ip().octets().into_iter().enumerate() {
            if 0 < place {
                text.push(b'.');
            }
            text.number(u16::from(octet));
        }
        text.push(b':');
        text.number(v4.port());
        f.pad(text.as_str())
    }
}

/// A few characters on the stack: the longest is `255.255.255.255:65535`.
#[derive(Default)]
struct Ascii {
    bytes: [u8; 21],
    length: usize,
}

impl Ascii {
    fn push(&mut self, byte: u8) {
        if let Some(place) = self.bytes.get_mut(self.length) {
            *place = byte;
            self.length += 1;
        }
    }

    fn number(&mut self, number: u16) {
        let mut scale = 10_000;
        while number < scale && 1 < scale {
            scale /= 10;
        }
        let mut rest = number;
        while 0 < scale {
            self.push(b'0' + (rest / scale) as u8);
            rest %= scale;
            scale /= 10;
        }
    }

    fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..self.length]).unwrap_or_default()
    }
}

macro_rules! name {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub Arc<str>);

        impl $name {
            /// The text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                $name(Arc::from(text))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

name!(
    /// A model as clients and engines call it; an adapter (LoRA) has a name of the same kind.
    ModelName
);
name!(
    /// A conversation, as the client names it.
    SessionId
);
name!(
    /// Whose cache a request may share; engines know it as `cache_salt`.
    Tenant
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_reads_as_the_standard_library_writes_it() {
        let ports = [0, 1, 9, 10, 99, 100, 8000, 9999, 10_000, 65_535];
        for ip in [
            "0.0.0.0",
            "10.0.0.1",
            "127.10.200.99",
            "255.255.255.255",
            "::1",
            "fd00::10",
        ] {
            for port in ports {
                let address = SocketAddr::new(ip.parse().unwrap(), port);
                let endpoint = Endpoint(address);
                assert_eq!(endpoint.to_string(), address.to_string());
                assert_eq!(format!("{endpoint:>26}|"), format!("{address:>26}|"));
            }
        }
    }
}
