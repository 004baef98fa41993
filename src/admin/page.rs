//! The decision page: our own files, compiled into the program.
//!
//! Lives here: the table of files and how they are served.
//! Never here: data; the page asks the other routes for it.
//! Invariant: the page loads nothing from elsewhere, and the browser is told to hold it to that.

use crate::admin::Body;
use bytes::Bytes;
use http_body_util::{Either, Full};
use hyper::{Response, header};

/// What the page may do: load our own files, and nothing else.
const POLICY: &str =
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";

/// Path, content type, content.
type File = (&'static str, &'static str, &'static str);

const FILES: &[File] = &[
    ("/", HTML, include_str!("page/index.html")),
    ("/page/page.css", STYLE, include_str!("page/page.css")),
    ("/page/main.js", SCRIPT, include_str!("page/main.js")),
    ("/page/api.js", SCRIPT, include_str!("page/api.js")),
    ("/page/dom.js", SCRIPT, include_str!("page/dom.js")),
    ("/page/pods.js", SCRIPT, include_str!("page/pods.js")),
    ("/page/live.js", SCRIPT, include_str!("page/live.js")),
    ("/page/detail.js", SCRIPT, include_str!("page/detail.js")),
    ("/page/policy.js", SCRIPT, include_str!("page/policy.js")),
    ("/page/whatif.js", SCRIPT, include_str!("page/whatif.js")),
    ("/page/theme.js", SCRIPT, include_str!("page/theme.js")),
    ("/page/words.js", SCRIPT, include_str!("page/words.js")),
    (
        "/page/icon.svg",
        "image/svg+xml",
        include_str!("page/icon.svg"),
    ),
];

/// The file at `path`, if it is one of the page's.
pub(super) fn find(path: &str) -> Option<&'static File> {
    FILES.iter().find(|(known, ..)| *known == path)
}

/// A file as an answer.
pub(super) fn answer((_, content_type, content): &'static File) -> Response<Body> {
    let body = Full::new(Bytes::from_static(content.as_bytes()));
    let mut response = Response::new(Either::Left(body));
    let headers = response.headers_mut();
    let value = header::HeaderValue::from_static;
    headers.insert(header::CONTENT_TYPE, value(content_type));
    headers.insert(header::CONTENT_SECURITY_POLICY, value(POLICY));
    headers.insert(header::REFERRER_POLICY, value("no-referrer"));
    // A new version of the program has new files under the same names.
    headers.insert(header::CACHE_CONTROL, value("no-store"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_names_no_other_machine_and_no_inline_code() {
        for (path, _, content) in FILES {
            let foreign = content
                .match_indices("://")
                .map(|(at, _)| &content[at.saturating_sub(6)..(at + 30).min(content.len())])
                .find(|around| !around.contains("://www.w3.org/2000/svg"));
            assert_eq!(foreign, None, "{path}");
            for word in [
                "<script>",
                "onclick=",
                "style=",
                "javascript:",
                "innerHTML",
                "eval(",
            ] {
                assert!(!content.contains(word), "{path}: {word}");
            }
        }
    }

    #[test]
    fn every_file_that_the_page_names_is_there() {
        for (path, _, content) in FILES {
            for (at, _) in content.match_indices("\"/page/") {
                let rest = &content[at + 1..];
                let name = &rest[..rest.find('"').unwrap()];
                assert!(find(name).is_some(), "{path} names {name}");
            }
        }
    }
}
