//! Which pods may be used for what.
//!
//! Lives here: the per-pod test and its named outcomes, and the request's subset in a form that is
//! cheap to ask once per pod.
//! Never here: costs, comparisons between pods.
//! Invariant: a pod that fails [`check`] is never part of a route.

use crate::decide::ask::{Subset, SubsetEntry};
use crate::decide::board::Member;
use crate::decide::reason::words;
use crate::decide::select::Purpose;
use crate::decide::snapshot::{Availability, Candidate, LocalPrefill, Serves};
use crate::names::Endpoint;
use rustc_hash::FxHashSet;
use std::net::IpAddr;

words! {
    /// Why a pod is not considered.
    Ineligible {
        /// It decodes only, and a prefill pod is wanted.
        DecodeRole => "decode_role",
        /// It prefills only, and a destination is wanted.
        PrefillRole => "prefill_role",
        /// It does not serve the model.
        NotThisModel => "not_this_model",
        /// It is not (yet) ready.
        NotReady => "not_ready",
        /// It is going away.
        Draining => "draining",
        /// It does not answer.
        Unreachable => "unreachable",
        /// The gateway's subset does not hold it.
        OutsideSubset => "outside_subset",
        /// Its engine refuses to prefill what it decodes.
        CannotPrefillLocally => "cannot_prefill_locally",
        /// The client named another pod.
        PinnedElsewhere => "pinned_elsewhere",
        /// The session belongs to another pod.
        SessionElsewhere => "session_elsewhere",
        /// It does the other half already, and its engine refuses to do both.
        AlreadyChosen => "already_chosen",
    }
}

/// Entries above which a subset is hashed instead of searched.
const FEW: usize = 8;

/// A request's subset, prepared so that asking for every pod of a large fleet stays linear.
#[derive(Clone, Debug)]
pub struct Allowed<'a> {
    listed: Listed<'a>,
    whom: Whom,
}

#[derive(Clone, Debug)]
enum Listed<'a> {
    /// Every endpoint.
    All,
    /// A short list, searched.
    Few(&'a [SubsetEntry]),
    /// A long list, hashed: whole addresses and single endpoints.
    Many(FxHashSet<IpAddr>, FxHashSet<Endpoint>),
}

/// Whom a subset concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whom {
    /// Pods that decode.
    Decoding,
    /// Those that prefill, too.
    Everyone,
}

impl<'a> Allowed<'a> {
    /// Every endpoint.
    pub const ALL: Allowed<'static> = Allowed {
        listed: Listed::All,
        whom: Whom::Everyone,
    };

    /// The endpoints that `subset` allows.
    #[must_use]
    pub fn new(subset: &'a Subset) -> Allowed<'a> {
        match subset {
            Subset::Any => Allowed::ALL,
            Subset::Only(entries) => Allowed {
                listed: Listed::new(entries),
                whom: Whom::Decoding,
            },
            Subset::Throughout(entries) => Allowed {
                listed: Listed::new(entries),
                whom: Whom::Everyone,
            },
        }
    }

    /// Whether every endpoint is allowed for `purpose`.
    #[inline]
    #[must_use]
    pub fn all(&self, purpose: Purpose) -> bool {
        let decodes = purpose != Purpose::Prefill;
        matches!(self.listed, Listed::All) || !(decodes || self.whom == Whom::Everyone)
    }

    /// Whether `endpoint` is allowed for `purpose`.
    #[inline]
    #[must_use]
    pub fn holds(&self, endpoint: Endpoint, purpose: Purpose) -> bool {
        self.all(purpose) || self.listed.has(endpoint)
    }
}

impl<'a> Listed<'a> {
    fn new(entries: &'a [SubsetEntry]) -> Listed<'a> {
        if entries.len() <= FEW {
            return Listed::Few(entries);
        }
        let mut ips = FxHashSet::default();
        let mut endpoints = FxHashSet::default();
        for entry in entries {
            match entry {
                SubsetEntry::Ip(ip) => ips.insert(*ip),
                SubsetEntry::Endpoint(endpoint) => endpoints.insert(*endpoint),
            };
        }
        Listed::Many(ips, endpoints)
    }

    fn has(&self, endpoint: Endpoint) -> bool {
        match self {
            Listed::All => true,
            Listed::Few(entries) => entries.iter().any(|entry| entry.covers(endpoint)),
            Listed::Many(ips, endpoints) => {
                endpoints.contains(&endpoint) || ips.contains(&endpoint.0.ip())
            }
        }
    }
}

impl Candidate {
    /// Whether it may be used for `purpose`, or the first reason why not.
    ///
    /// # Errors
    /// That reason.
    pub fn check(&self, allowed: &Allowed<'_>, purpose: Purpose) -> Result<(), Ineligible> {
        check(&self.member(), self.serves, allowed, purpose)
    }
}

/// Whether the pod `member` may be used for `purpose`, or the first reason why not.
///
/// The subset concerns the pod that the gateway sends the request to, and always the one that decodes,
/// which is the destination of all that is not prefilled remotely. A prefill pod that is only reached by
/// the destination may be any (see [`Subset`]).
///
/// # Errors
/// That reason.
pub fn check(
    member: &Member,
    serves: Serves,
    allowed: &Allowed<'_>,
    purpose: Purpose,
) -> Result<(), Ineligible> {
    match purpose {
        Purpose::Prefill if !member.role.prefills() => return Err(Ineligible::DecodeRole),
        Purpose::PrefillAndDecode | Purpose::DecodeOnly if !member.role.decodes() => {
            return Err(Ineligible::PrefillRole);
        }
        _ => {}
    }
    if serves == Serves::NotThisModel {
        return Err(Ineligible::NotThisModel);
    }
    match member.availability {
        Availability::Ready => {}
        Availability::NotReady => return Err(Ineligible::NotReady),
        Availability::Draining => return Err(Ineligible::Draining),
        Availability::Unreachable => return Err(Ineligible::Unreachable),
    }
    if !allowed.holds(member.endpoint, purpose) {
        return Err(Ineligible::OutsideSubset);
    }
    if purpose == Purpose::PrefillAndDecode && member.local_prefill == LocalPrefill::Unable {
        return Err(Ineligible::CannotPrefillLocally);
    }
    Ok(())
}
