//! The cases of `tests/golden/decide`: one YAML file per subject, each case a request, the pods as
//! they are at that moment, and the decision that is right.
//!
//! A file has `policy` and `pods`, from which every case starts, and `cases`. A case may change
//! single fields of either; a pod set to `null` is left out. Pods are named; `subset`, pins and
//! sessions refer to them by name (`ip:d1` in a subset stands for the whole address). Quantities are
//! tokens where the field is called `cached`, `host` or `disk` (a multiple of the block size), and
//! blocks where it is called so. Without `draw`, a case must come out the same for many draws.
//! `shadow` changes fields of the case's policy for a second one, whose opinion is `wantShadow`.
//! `want.net_new` is what the rule looked at: the prompt less what the best decode pod holds.

use crate::decide_fixture as fix;
use serde::Deserialize;
use serde_yaml::{Mapping, Value};
use sidestep::decide::ask::{Affinity, Ask, AskKind, Pin, Subset, SubsetEntry};
use sidestep::decide::policy::{
    Bypass, ClientPins, DecodeGate, IslBound, Match, OnNoPrefill, Policy, PrefillBusy, Rule,
    Scoring, TierCredit,
};
use sidestep::decide::shadow::{Decided, Opinion, opinion};
use sidestep::decide::snapshot::{
    Availability, Candidate, Capacity, CapacitySource, EngineReport, KvSource, LocalPrefill,
    PodLoad, Role, Serves, Snapshot, TierBlocks,
};
use sidestep::decide::{Because, Check, Decision, NoRoute, decide};
use sidestep::names::{Endpoint, ModelName, PodId};
use sidestep::units::{BlockSize, Blocks, Tokens};
use std::collections::HashSet;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    policy: Mapping,
    #[serde(default)]
    pods: Mapping,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    name: String,
    #[serde(default)]
    policy: Mapping,
    ask: AskYaml,
    #[serde(default)]
    pods: Mapping,
    want: Want,
    /// What the policy in the shadow has otherwise than the case's own.
    shadow: Option<Mapping>,
    #[serde(rename = "wantShadow")]
    want_shadow: Option<Want>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Want {
    route: Option<String>,
    because: Option<String>,
    refused: Option<String>,
    decode: Option<String>,
    prefill: Option<String>,
    net_new: Option<u64>,
    rule: Option<usize>,
    checks: Option<Vec<String>>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Sequences {
    Several,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct AskYaml {
    prompt: Option<u64>,
    pass_through: Option<String>,
    sequences: Option<Sequences>,
    model: Option<String>,
    class: Option<String>,
    #[serde(default)]
    priority: i32,
    subset: Option<Vec<String>>,
    decode_pin: Option<String>,
    prefill_pin: Option<String>,
    session_prefill: Option<String>,
    soft_session: Option<String>,
    hard_session: Option<String>,
    draw: Option<u64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct PolicyYaml {
    bypass: String,
    effective_isl_threshold: u64,
    effective_isl_ratio_threshold: f64,
    cold_bypass_below: u64,
    tier_credit: String,
    prefill_busy_threshold: f64,
    decode_busy_threshold: Option<f64>,
    trust: Vec<CapacitySource>,
    on_no_prefill: String,
    client_pins: String,
    models: Vec<Arc<str>>,
    classes: Vec<Arc<str>>,
    min_priority: Option<i32>,
    scoring: ScoringYaml,
    /// Rules tried before the one that the fields above make.
    before: Vec<PolicyYaml>,
}

impl Default for PolicyYaml {
    fn default() -> Self {
        PolicyYaml {
            bypass: "IslBounding".into(),
            effective_isl_threshold: 2048,
            effective_isl_ratio_threshold: 0.7,
            cold_bypass_below: 0,
            tier_credit: "Full".into(),
            prefill_busy_threshold: 1.0,
            decode_busy_threshold: None,
            trust: vec![CapacitySource::Reported, CapacitySource::Configured],
            on_no_prefill: "Local".into(),
            client_pins: "Ignore".into(),
            models: Vec::new(),
            classes: Vec::new(),
            min_priority: None,
            scoring: ScoringYaml::default(),
            before: Vec::new(),
        }
    }
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct ScoringYaml {
    overlap_credit: Option<f64>,
    host_tier: Option<f64>,
    disk_tier: Option<f64>,
    prefill_load_scale: Option<f64>,
    active_request_weight: Option<f64>,
    temperature: Option<f64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PodYaml {
    role: Role,
    /// Another pod, whose address it shares on a port of its own.
    same_address: Option<String>,
    #[serde(default)]
    state: State,
    #[serde(default)]
    other_model: bool,
    #[serde(default)]
    local_prefill: Option<LocalPrefill>,
    block_size: Option<u32>,
    #[serde(default)]
    cached: u64,
    #[serde(default)]
    host: u64,
    #[serde(default)]
    disk: u64,
    #[serde(default)]
    kv: Kv,
    #[serde(default)]
    requests: u32,
    #[serde(default)]
    prefill_tokens: u64,
    #[serde(default)]
    decode_blocks: u32,
    #[serde(default)]
    shared_blocks: u32,
    prefill_capacity: Option<CapacityYaml>,
    kv_blocks: Option<CapacityYaml>,
    kv_usage: Option<f64>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "snake_case")]
enum State {
    #[default]
    Ready,
    NotReady,
    Draining,
    Unreachable,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "snake_case")]
enum Kv {
    #[default]
    Live,
    Syncing,
    Lost,
    Absent,
}

/// `8192` is reported by the engine, `{ assumed: 8192 }` is not, `unknown` is neither.
#[derive(Deserialize)]
#[serde(untagged)]
enum CapacityYaml {
    Reported(u32),
    Unknown(#[allow(dead_code, reason = "the word itself carries nothing")] UnknownWord),
    Configured { configured: u32 },
    Assumed { assumed: u32 },
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum UnknownWord {
    Unknown,
}

impl CapacityYaml {
    fn capacity<T>(&self, unit: impl Fn(u32) -> T) -> Capacity<T> {
        match self {
            CapacityYaml::Reported(value) => Capacity::Reported(unit(*value)),
            CapacityYaml::Configured { configured } => Capacity::Configured(unit(*configured)),
            CapacityYaml::Assumed { assumed } => Capacity::Assumed(unit(*assumed)),
            CapacityYaml::Unknown(_) => Capacity::Unknown,
        }
    }
}

impl PolicyYaml {
    fn rule(&self) -> Rule {
        let bound = IslBound {
            threshold: Tokens(self.effective_isl_threshold),
            ratio: fix::ratio(self.effective_isl_ratio_threshold),
            cold_bypass_below: Tokens(self.cold_bypass_below),
            tier_credit: match self.tier_credit.as_str() {
                "Full" => TierCredit::Full,
                "Weighted" => TierCredit::Weighted,
                other => panic!("tierCredit: {other}"),
            },
        };
        let busy = PrefillBusy {
            threshold: fix::ratio(self.prefill_busy_threshold),
        };
        Rule {
            matches: Match {
                models: self.models.clone(),
                policy_classes: self.classes.clone(),
                min_priority: self.min_priority,
            },
            bypass: match self.bypass.as_str() {
                "Never" => Bypass::Never,
                "Always" => Bypass::Always,
                "IslBounding" => Bypass::IslBounding(bound),
                "PrefillLoad" => Bypass::PrefillLoad(busy),
                "IslOrLoad" => Bypass::IslOrLoad(bound, busy),
                other => panic!("bypass: {other}"),
            },
            gate: match self.decode_busy_threshold {
                None => DecodeGate::Off,
                Some(threshold) => DecodeGate::On {
                    threshold: fix::ratio(threshold),
                    trust: self.trust.clone(),
                },
            },
            on_no_prefill: match self.on_no_prefill.as_str() {
                "Local" => OnNoPrefill::Local,
                "Fail" => OnNoPrefill::Fail,
                other => panic!("onNoPrefill: {other}"),
            },
        }
    }

    fn policy(&self) -> Policy {
        let rules = self.before.iter().map(PolicyYaml::rule);
        let mut policy = fix::policy(rules.chain([self.rule()]));
        policy.client_pins = match self.client_pins.as_str() {
            "Ignore" => ClientPins::Ignore,
            "Honor" => ClientPins::Honor,
            other => panic!("clientPins: {other}"),
        };
        let Scoring {
            overlap_credit,
            host_tier,
            disk_tier,
            prefill_load_scale,
            active_request_weight,
            temperature,
        } = &mut policy.scoring;
        for (weight, given) in [
            (overlap_credit, self.scoring.overlap_credit),
            (host_tier, self.scoring.host_tier),
            (disk_tier, self.scoring.disk_tier),
            (prefill_load_scale, self.scoring.prefill_load_scale),
            (active_request_weight, self.scoring.active_request_weight),
            (temperature, self.scoring.temperature),
        ] {
            if let Some(given) = given {
                *weight = fix::ratio(given);
            }
        }
        policy
    }
}

impl PodYaml {
    fn candidate(&self, slot: u16) -> Candidate {
        let block_size = BlockSize::new(self.block_size.unwrap_or(fix::BLOCK)).unwrap();
        let blocks = |tokens: u64| {
            let blocks = block_size.full_blocks(Tokens(tokens));
            assert_eq!(block_size.tokens(blocks).0, tokens, "whole blocks only");
            blocks
        };
        let mut pod = fix::pod(slot, self.role);
        pod.availability = match self.state {
            State::Ready => Availability::Ready,
            State::NotReady => Availability::NotReady,
            State::Draining => Availability::Draining,
            State::Unreachable => Availability::Unreachable,
        };
        if self.other_model {
            pod.serves = Serves::NotThisModel;
        }
        pod.local_prefill = self.local_prefill.unwrap_or(LocalPrefill::Able);
        pod.block_size = block_size;
        pod.cached = TierBlocks {
            device: blocks(self.cached),
            host: blocks(self.host),
            disk: blocks(self.disk),
        };
        pod.kv_source = match self.kv {
            Kv::Live => KvSource::Live,
            Kv::Syncing => KvSource::Syncing,
            Kv::Lost => KvSource::Lost,
            Kv::Absent => KvSource::Absent,
        };
        pod.load = PodLoad {
            requests: self.requests,
            prefill_tokens: Tokens(self.prefill_tokens),
            decode_blocks: Blocks(self.decode_blocks),
            shared_blocks: Blocks(self.shared_blocks),
        };
        if let Some(capacity) = &self.prefill_capacity {
            pod.prefill_capacity = capacity.capacity(|tokens| Tokens(u64::from(tokens)));
        }
        if let Some(capacity) = &self.kv_blocks {
            pod.kv_capacity = capacity.capacity(Blocks);
        }
        if let Some(usage) = self.kv_usage {
            pod.engine = EngineReport::Fresh {
                waiting: 0,
                running: 0,
                kv_usage: fix::ratio(usage),
            };
        }
        pod
    }
}

/// The pods of one case by name.
struct Pods {
    names: Vec<String>,
    snapshot: Snapshot,
}

impl Pods {
    fn find(&self, name: &str) -> Candidate {
        let index = self.names.iter().position(|known| known == name);
        let index = index.unwrap_or_else(|| panic!("no pod is called {name}"));
        self.snapshot.candidate(index)
    }

    /// The endpoint of a pod, or of nobody when the name is `gone`.
    fn endpoint(&self, name: &str) -> Endpoint {
        match name {
            "gone" => fix::endpoint(u16::MAX),
            name => self.find(name).endpoint,
        }
    }

    fn id(&self, name: &str) -> PodId {
        match name {
            "gone" => fix::id(u16::MAX),
            name => self.find(name).pod,
        }
    }

    fn name(&self, pod: PodId) -> &str {
        &self.names[usize::from(pod.slot)]
    }
}

impl AskYaml {
    fn ask(&self, pods: &Pods) -> Ask {
        let mut ask = fix::ask(self.prompt.unwrap_or(0));
        if self.pass_through.is_some() {
            ask.kind = AskKind::PassThrough;
        }
        if let Some(Sequences::Several) = self.sequences {
            ask.kind = AskKind::GenerateSeveral;
        }
        ask.model = self.model.as_deref().map(ModelName::from);
        ask.policy_class = self.class.as_deref().map(Arc::from);
        ask.priority = self.priority;
        if let Some(entries) = &self.subset {
            let entries = entries.iter().map(|entry| match entry.strip_prefix("ip:") {
                Some(name) => SubsetEntry::Ip(pods.endpoint(name).0.ip()),
                None => SubsetEntry::Endpoint(pods.endpoint(entry)),
            });
            ask.subset = Subset::Only(entries.collect());
        }
        let pin = |name: &String| match name.strip_prefix("ip:") {
            Some(name) => Pin::Address(pods.endpoint(name).0.ip()),
            None => Pin::Endpoint(pods.endpoint(name)),
        };
        ask.decode_pin = self.decode_pin.as_ref().map(pin);
        ask.prefill_pin = self.prefill_pin.as_ref().map(pin);
        ask.prefill_affinity = self.session_prefill.as_ref().map(|name| pods.id(name));
        ask.affinity = match (&self.soft_session, &self.hard_session) {
            (Some(name), None) => Affinity::Soft(pods.id(name)),
            (None, Some(name)) => Affinity::Hard(pods.id(name)),
            (None, None) => Affinity::None,
            (Some(_), Some(_)) => panic!("a session is soft or hard"),
        };
        ask
    }
}

/// `over` laid over `base`, maps field by field, `null` removing a field.
fn merged(base: &Mapping, over: &Mapping) -> Mapping {
    let mut result = base.clone();
    for (key, value) in over {
        match (result.get_mut(key), value) {
            (_, Value::Null) => {
                result.shift_remove(key);
            }
            (Some(Value::Mapping(old)), Value::Mapping(new)) => *old = merged(old, new),
            _ => {
                result.insert(key.clone(), value.clone());
            }
        }
    }
    result
}

fn parse<T: serde::de::DeserializeOwned>(value: Mapping) -> T {
    serde_yaml::from_value(Value::Mapping(value)).unwrap_or_else(|fault| panic!("{fault}"))
}

/// What is right and did not come out, a line each.
fn faults(want: &Want, got: &Result<Decision, NoRoute>, pods: &Pods) -> Vec<String> {
    let mut faults = Vec::new();
    let mut expect = |what: &str, want: Option<String>, got: Option<String>| {
        if want != got {
            faults.push(format!("{what}: want {want:?}, got {got:?}"));
        }
    };
    let decision = got.as_ref().ok();
    let refused = got.as_ref().err().map(|no_route| no_route.as_str());
    expect("refused", want.refused.clone(), refused.map(Into::into));
    let route = decision.map(|decision| decision.route.as_str());
    expect("route", want.route.clone(), route.map(Into::into));
    let because = decision.map(|decision| decision.because.as_str());
    expect("because", want.because.clone(), because.map(Into::into));
    let Some(decision) = decision else {
        return faults;
    };
    let prefill = decision.route.prefill();
    let prefill = prefill.map(|pick| pods.name(pick.candidate.pod).to_owned());
    expect("prefill", want.prefill.clone(), prefill);
    if want.decode.is_some() {
        let decode = pods.name(decision.route.decode().candidate.pod);
        expect("decode", want.decode.clone(), Some(decode.to_owned()));
    }
    if let Some(net_new) = want.net_new {
        let local = decision.considered.local;
        let judged = local.map(|pick| pick.net_new_tokens.to_string());
        expect("net_new", Some(net_new.to_string()), judged);
    }
    if let Some(rule) = want.rule {
        expect(
            "rule",
            Some(rule.to_string()),
            Some(decision.rule.to_string()),
        );
    }
    if let Some(checks) = &want.checks {
        let words = words(&decision.checks);
        expect("checks", Some(checks.join(" ")), Some(words));
    }
    faults
}

/// What was reached by one case: reasons of decisions and refusals.
type Reached = HashSet<&'static str>;

fn run(file: &File, case: &Case, reached: &mut Reached) -> Vec<String> {
    let own = merged(&file.policy, &case.policy);
    let shadow = case.shadow.as_ref().map(|shadow| merged(&own, shadow));
    let shadow = shadow.map(|shadow| parse::<PolicyYaml>(shadow).policy());
    let policy = parse::<PolicyYaml>(own).policy();
    let pods = pods(file, case);
    let mut ask = case.ask.ask(&pods);
    let draws = match case.ask.draw {
        Some(draw) => vec![draw],
        None => (0..16).map(|step| step * (u64::MAX / 16)).collect(),
    };
    for draw in draws {
        ask.draw = draw;
        let got = decide(&ask, &pods.snapshot, &policy);
        reached.insert(match &got {
            Ok(decision) => decision.because.as_str(),
            Err(cause) => cause.as_str(),
        });
        let mut all = faults(&case.want, &got, &pods);
        match (&shadow, &case.want_shadow) {
            (Some(shadow), Some(want)) => {
                let decided = Decided {
                    policy: &policy,
                    result: &got,
                };
                let opinion = opinion(&ask, ask.affinity, &pods.snapshot, decided, shadow);
                let found = shadow_faults(want, &opinion, &pods).into_iter();
                all.extend(found.map(|fault| format!("shadow: {fault}")));
            }
            (None, None) => {}
            _ => all.push("shadow and wantShadow go together".to_owned()),
        }
        if !all.is_empty() {
            return all;
        }
    }
    Vec::new()
}

/// What a shadow was to think and does not, a line each.
fn shadow_faults(want: &Want, opinion: &Opinion, pods: &Pods) -> Vec<String> {
    let at = |endpoint: Endpoint| {
        let mut all = pods.snapshot.candidates();
        let pod = all.find(|pod| pod.endpoint == endpoint).unwrap();
        pods.name(pod.pod).to_owned()
    };
    let course = opinion.verdict.as_ref();
    let route = course.map(|course| course.because.route().to_owned()).ok();
    let checks = course.map(|course| words(&course.checks)).ok();
    let rows = [
        (
            "refused",
            &want.refused,
            opinion
                .verdict
                .as_ref()
                .err()
                .map(|cause| cause.as_str().to_owned()),
        ),
        ("route", &want.route, route),
        (
            "because",
            &want.because,
            course.map(|course| course.because.to_string()).ok(),
        ),
        (
            "decode",
            &want.decode,
            course.map(|course| at(course.decode)).ok(),
        ),
        (
            "prefill",
            &want.prefill,
            course.ok().and_then(|course| course.prefill).map(at),
        ),
        (
            "rule",
            &want.rule.map(|rule| rule.to_string()),
            want.rule.map(|_| opinion.rule.to_string()),
        ),
        (
            "checks",
            &want.checks.as_ref().map(|checks| checks.join(" ")),
            want.checks.as_ref().and(checks),
        ),
    ];
    let wrong = rows.into_iter().filter(|(_, want, got)| *want != got);
    wrong
        .map(|(what, want, got)| format!("{what}: want {want:?}, got {got:?}"))
        .collect()
}

/// `+net_new -ratio`
fn words(checks: &[Check]) -> String {
    let words = checks.iter().map(|check| {
        let sign = if check.allows_bypass { "+" } else { "-" };
        format!("{sign}{}", check.what)
    });
    words.collect::<Vec<_>>().join(" ")
}

fn pods(file: &File, case: &Case) -> Pods {
    let given: Vec<(String, PodYaml)> = merged(&file.pods, &case.pods)
        .into_iter()
        .map(|(name, pod)| {
            let name = name.as_str().unwrap().to_owned();
            let pod = serde_yaml::from_value::<PodYaml>(pod)
                .unwrap_or_else(|fault| panic!("{}: {name}: {fault}", case.name));
            (name, pod)
        })
        .collect();
    let names: Vec<String> = given.iter().map(|(name, _)| name.clone()).collect();
    let candidates = given.iter().zip(0..).map(|((_, pod), slot)| {
        let mut candidate = pod.candidate(slot);
        if let Some(other) = &pod.same_address {
            let other = names.iter().position(|name| name == other).unwrap();
            let ip = fix::endpoint(u16::try_from(other).unwrap()).0.ip();
            candidate.endpoint = Endpoint(SocketAddr::new(ip, 9000 + slot));
        }
        candidate
    });
    Pods {
        snapshot: candidates.collect(),
        names,
    }
}

#[test]
fn every_golden_case_decides_as_written() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/decide");
    let mut paths: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|ext| ext == "yaml"))
        .collect();
    paths.sort();
    let mut count = 0;
    let mut wrong = String::new();
    let mut reached = Reached::new();
    for path in paths {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let text = std::fs::read_to_string(&path).unwrap();
        let file: File =
            serde_yaml::from_str(&text).unwrap_or_else(|fault| panic!("{name}: {fault}"));
        let mut seen = HashSet::new();
        for case in &file.cases {
            assert!(seen.insert(&case.name), "{name}: twice: {}", case.name);
            count += 1;
            for fault in run(&file, case, &mut reached) {
                wrong += &format!("\n{name}: {}\n    {fault}", case.name);
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert!(120 <= count, "only {count} cases were found");
    let every = Because::ALL.iter().map(|because| because.as_str());
    let every = every.chain(NoRoute::WORDS.iter().copied());
    let missed: Vec<&str> = every.filter(|word| !reached.contains(word)).collect();
    assert!(missed.is_empty(), "no case ends with {missed:?}");
}
