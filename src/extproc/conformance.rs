//! What the conformance tests of the Gateway API Inference Extension ask of an endpoint picker.
//!
//! Lives here: the request header by which a test chooses endpoints, and the name of the response
//! header that tells it which one served.
//! Never here: anything that happens while the switch is off, as it is in production.
//! Invariant: a test can narrow what the gateway allows, never widen it.
//!
//! Protocol: <https://github.com/kubernetes-sigs/gateway-api-inference-extension/tree/main/conformance>.

use crate::decide::ask::{Subset, SubsetEntry};
use crate::names::Endpoint;
use crate::pick::Head;
use std::sync::Arc;

/// Endpoints that a test allows, `ip` or `ip:port`, with commas between them.
pub const SELECTION: &str = "test-epp-endpoint-selection";
/// The endpoint that served, `ip:port`, told to the test.
pub const SERVED_ECHO: &str = "x-conformance-test-served-endpoint";
/// Most entries of a selection that are read: far above any test's.
const MOST: usize = 256;

/// Whether conformance tests may steer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Conformance {
    /// No.
    #[default]
    Disabled,
    /// Yes.
    Enabled,
}

/// Narrows what the gateway allows to what the request's test selects.
pub(crate) fn narrow(head: &mut Head) {
    if !head.headers.contains(SELECTION) {
        return;
    }
    let selected: Vec<SubsetEntry> = head
        .headers
        .get_all(SELECTION)
        .flat_map(|value| value.split(','))
        .filter_map(|token| entry(token.trim()))
        .take(MOST)
        .collect();
    head.subset = match &head.subset {
        Subset::Any => Subset::Only(Arc::from(selected)),
        Subset::Only(allowed) | Subset::Throughout(allowed) => {
            let both = selected
                .iter()
                .flat_map(|one| allowed.iter().filter_map(|other| common(*one, *other)));
            Subset::Only(both.collect())
        }
    };
}

/// What two entries allow both.
fn common(one: SubsetEntry, other: SubsetEntry) -> Option<SubsetEntry> {
    match (one, other) {
        (SubsetEntry::Ip(a), SubsetEntry::Ip(b)) => (a == b).then_some(one),
        (SubsetEntry::Endpoint(endpoint), wider) => wider.covers(endpoint).then_some(one),
        (wider, SubsetEntry::Endpoint(endpoint)) => wider.covers(endpoint).then_some(other),
    }
}

fn entry(token: &str) -> Option<SubsetEntry> {
    let bare = token.trim_start_matches('[').trim_end_matches(']');
    let ip = bare.parse().ok().map(SubsetEntry::Ip);
    ip.or_else(|| {
        token
            .parse()
            .ok()
            .map(|at| SubsetEntry::Endpoint(Endpoint(at)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn narrowed(subset: Subset, selection: &[&'static str]) -> Subset {
        let mut head = Head {
            subset,
            ..Head::default()
        };
        for value in selection {
            head.headers.push(SELECTION, *value);
        }
        narrow(&mut head);
        head.subset
    }

    fn only(tokens: &[&str]) -> Subset {
        let entries: Vec<_> = tokens.iter().map(|token| entry(token).unwrap()).collect();
        Subset::Only(Arc::from(entries))
    }

    #[test]
    fn a_selection_takes_the_place_of_no_hint() {
        assert_eq!(narrowed(Subset::Any, &[]), Subset::Any);
        assert_eq!(
            narrowed(Subset::Any, &["10.0.0.1, 10.0.0.2:3000", "[fd00::1]:3002"]),
            only(&["10.0.0.1", "10.0.0.2:3000", "[fd00::1]:3002"])
        );
    }

    #[test]
    fn a_selection_narrows_a_hint_and_never_widens_it() {
        let hint = only(&["10.0.0.1", "10.0.0.2:3000"]);
        assert_eq!(
            narrowed(hint.clone(), &["10.0.0.1:3002,10.0.0.2,10.0.0.3"]),
            only(&["10.0.0.1:3002", "10.0.0.2:3000"])
        );
        assert_eq!(narrowed(hint, &["10.0.0.9"]), only(&[]));
    }

    #[test]
    fn a_selection_that_names_nothing_allows_nothing() {
        assert_eq!(narrowed(Subset::Any, &[""]), only(&[]));
        assert_eq!(narrowed(Subset::Any, &["pod-1"]), only(&[]));
    }
}
