//! Who may see what on the admin port.
//!
//! Lives here: [`Access`], [`Token`], and the checks of a request's head.
//! Never here: what is shown.
//! Invariant: pods, policy and decisions are shown only to this machine or to who knows the token;
//! metrics and health are shown to all, as scrapers and probes expect.

use hyper::header::{AUTHORIZATION, HOST, HeaderMap, ORIGIN};
use std::fmt;
use std::net::{IpAddr, SocketAddr};

/// Shortest token: 16 characters of base64 are 96 bits.
const SHORTEST: usize = 16;
/// Longest token.
const LONGEST: usize = 4096;

/// Who may see pods, policy and decisions.
#[derive(Debug)]
pub enum Access {
    /// Whoever connects from this machine, to a loopback address.
    Loopback,
    /// Whoever knows the token, from wherever.
    Token(Token),
}

/// A secret that clients send as `authorization: Bearer …`. Its debug form does not show it.
pub struct Token(String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

/// Why a text is no token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected a token of {SHORTEST} to {LONGEST} printable ASCII characters without spaces, found \
     {found}"
)]
pub struct TokenError {
    found: String,
}

impl Token {
    /// The token in `text`; white space around it, such as the end of a file's line, is not part of it.
    ///
    /// # Errors
    /// When it is too short to be a secret, too long, or cannot stand in a header.
    pub fn parse(text: &str) -> Result<Token, TokenError> {
        let token = text.trim_ascii();
        if !(SHORTEST..=LONGEST).contains(&token.len()) {
            let found = format!("{} bytes", token.len());
            return Err(TokenError { found });
        }
        if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            let found = "another character".to_owned();
            return Err(TokenError { found });
        }
        Ok(Token(token.to_owned()))
    }

    /// Whether `given` is this token. The time it takes does not depend on where they differ.
    fn is(&self, given: &[u8]) -> bool {
        let own = self.0.as_bytes();
        let differing = own
            .iter()
            .zip(given)
            .fold(0, |differing, (a, b)| differing | (a ^ b));
        own.len() == given.len() && std::hint::black_box(differing) == 0
    }
}

/// The two ends of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ends {
    pub(super) local: IpAddr,
    pub(super) peer: IpAddr,
}

impl Ends {
    pub(super) fn new(local: SocketAddr, peer: SocketAddr) -> Ends {
        // A socket that listens on [::] shows IPv4 peers as mapped addresses.
        Ends {
            local: local.ip().to_canonical(),
            peer: peer.ip().to_canonical(),
        }
    }

    fn on_this_machine(self) -> bool {
        self.local.is_loopback() && self.peer.is_loopback()
    }
}

/// Why a request is not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Denied {
    /// It came over the network, and there is no token.
    NotFromHere,
    /// It asks for a host that is not this machine: a page of another site may be behind it (DNS
    /// rebinding).
    OtherHost,
    /// A page of another site asks: it cannot read the answer, but asking may take something from those who
    /// can.
    OtherPage,
    /// It has no token, or a wrong one.
    WrongToken,
}

impl Denied {
    /// What to do about it.
    pub(super) fn message(self) -> &'static str {
        match self {
            Denied::NotFromHere => {
                "pods, policy and decisions are shown on loopback only; forward the port (kubectl \
                 port-forward), or set admin.token in the config"
            }
            Denied::OtherHost => {
                "the host header names another machine; open this page as localhost or by its IP \
                 address"
            }
            Denied::OtherPage => "a page of another site asks; open the page of this port instead",
            Denied::WrongToken => "expected the header authorization: Bearer <admin token>",
        }
    }
}

impl Access {
    /// Whether a request with these `headers` may see everything.
    pub(super) fn check(&self, ends: Ends, headers: &HeaderMap) -> Result<(), Denied> {
        match self {
            Access::Loopback if !ends.on_this_machine() => Err(Denied::NotFromHere),
            Access::Loopback if !names_this_machine(headers) => Err(Denied::OtherHost),
            Access::Loopback if !asked_by_nobody_else(headers) => Err(Denied::OtherPage),
            Access::Loopback => Ok(()),
            Access::Token(token) => {
                let given = headers
                    .get(AUTHORIZATION)
                    .map(hyper::header::HeaderValue::as_bytes)
                    .and_then(bearer);
                if given.is_some_and(|given| token.is(given)) {
                    Ok(())
                } else {
                    Err(Denied::WrongToken)
                }
            }
        }
    }

    /// Whether the page itself, which holds no data, may be loaded: with a token, a browser must get
    /// the form that asks for it.
    pub(super) fn check_page(&self, ends: Ends, headers: &HeaderMap) -> Result<(), Denied> {
        match self {
            Access::Loopback => self.check(ends, headers),
            Access::Token(_) => Ok(()),
        }
    }
}

fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(7)?;
    scheme
        .eq_ignore_ascii_case(b"bearer ")
        .then(|| token.trim_ascii())
}

/// Whether the request names this machine in a way that no foreign DNS server can answer for: an
/// address, or `localhost`.
fn names_this_machine(headers: &HeaderMap) -> bool {
    let mut hosts = headers.get_all(HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else {
        return false;
    };
    let Some(authority) = host
        .to_str()
        .ok()
        .and_then(|host| host.parse::<http::uri::Authority>().ok())
    else {
        return false;
    };
    let host = authority.host();
    let address = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || address.parse::<IpAddr>().is_ok()
}

/// Whether no page asks, or one that was loaded from where the request goes.
fn asked_by_nobody_else(headers: &HeaderMap) -> bool {
    let mut origins = headers.get_all(ORIGIN).iter();
    let (origin, host) = match (origins.next(), origins.next(), headers.get(HOST)) {
        (None, _, _) => return true,
        (Some(origin), None, Some(host)) => (origin.as_bytes(), host.as_bytes()),
        _ => return false,
    };
    let from = origin
        .strip_prefix(b"http://")
        .or_else(|| origin.strip_prefix(b"https://"));
    from.is_some_and(|from| from.eq_ignore_ascii_case(host))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::header::HeaderValue;

    const SECRET: &str = "0123456789abcdef";

    fn ends(local: &str, peer: &str) -> Ends {
        Ends::new(
            SocketAddr::new(local.parse().unwrap(), 1),
            SocketAddr::new(peer.parse().unwrap(), 2),
        )
    }

    fn here() -> Ends {
        ends("127.0.0.1", "127.0.0.1")
    }

    fn with(name: hyper::header::HeaderName, value: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(name, HeaderValue::from_str(value).unwrap());
        headers
    }

    #[test]
    fn without_a_token_only_this_machine_is_shown_anything() {
        let host = with(HOST, "127.0.0.1:9090");
        let access = Access::Loopback;
        assert_eq!(access.check(here(), &host), Ok(()));
        assert_eq!(access.check(ends("::1", "::1"), &host), Ok(()));
        let mapped = ends("::ffff:127.0.0.1", "::ffff:127.0.0.1");
        assert_eq!(access.check(mapped, &host), Ok(()));
        for (local, peer) in [
            ("10.0.0.1", "10.0.0.2"),
            ("10.0.0.1", "10.0.0.1"),
            ("127.0.0.1", "10.0.0.2"),
            ("10.0.0.1", "127.0.0.1"),
            ("::ffff:10.0.0.1", "::ffff:10.0.0.2"),
        ] {
            let denied = access.check(ends(local, peer), &host);
            assert_eq!(denied, Err(Denied::NotFromHere), "{local} {peer}");
            assert_eq!(
                access.check_page(ends(local, peer), &host),
                Err(Denied::NotFromHere)
            );
        }
    }

    #[test]
    fn a_name_that_a_foreign_site_could_point_here_is_denied() {
        for host in [
            "localhost",
            "LocalHost:9090",
            "127.0.0.1",
            "127.0.0.1:9090",
            "[::1]:9090",
            "10.1.2.3:80",
        ] {
            let headers = with(HOST, host);
            assert_eq!(Access::Loopback.check(here(), &headers), Ok(()), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:9090",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "",
            "localhost/../x",
        ] {
            let headers = with(HOST, host);
            let denied = Access::Loopback.check(here(), &headers);
            assert_eq!(denied, Err(Denied::OtherHost), "{host}");
        }
        let mut two = with(HOST, "localhost");
        two.append(HOST, HeaderValue::from_static("localhost"));
        assert_eq!(Access::Loopback.check(here(), &two), Err(Denied::OtherHost));
        assert_eq!(
            Access::Loopback.check(here(), &HeaderMap::new()),
            Err(Denied::OtherHost)
        );
    }

    #[test]
    fn with_a_token_only_the_token_counts() {
        let access = Access::Token(Token::parse(SECRET).unwrap());
        let far = ends("10.0.0.1", "10.0.0.2");
        for given in [format!("Bearer {SECRET}"), format!("bearer  {SECRET} ")] {
            let headers = with(AUTHORIZATION, &given);
            assert_eq!(access.check(far, &headers), Ok(()), "{given}");
        }
        for given in [
            "Bearer 0123456789abcdeg".to_owned(),
            format!("Bearer {SECRET}0"),
            format!("Bearer {}", &SECRET[..15]),
            "Bearer ".to_owned(),
            SECRET.to_owned(),
            format!("Basic {SECRET}"),
        ] {
            let headers = with(AUTHORIZATION, &given);
            for ends in [far, here()] {
                let denied = access.check(ends, &headers);
                assert_eq!(denied, Err(Denied::WrongToken), "{given}");
            }
        }
        assert_eq!(access.check_page(far, &HeaderMap::new()), Ok(()));
    }

    #[test]
    fn a_token_is_a_secret_that_fits_a_header() {
        assert!(Token::parse(&format!("  {SECRET}\r\n")).is_ok());
        for (text, found) in [
            ("short", "5 bytes"),
            ("", "0 bytes"),
            ("two words are not a token", "another character"),
            ("0123456789abcdé9", "another character"),
        ] {
            let error = Token::parse(text).unwrap_err().to_string();
            assert!(error.ends_with(&format!("found {found}")), "{error}");
        }
        let token = Token::parse(SECRET).unwrap();
        assert!(!format!("{token:?}").contains(SECRET));
    }
}
