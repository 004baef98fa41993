use super::*;
use crate::telemetry::explanation::{
    CapacityLine, CostLine, EngineLine, LoadLine, PolicyName, RequestLine, TierLine,
};

fn check(what: &str, value: f64, operator: &str, threshold: f64, allows: bool) -> CheckLine {
    CheckLine {
        what: what.to_owned(),
        value,
        operator: operator.to_owned(),
        threshold,
        allows_bypass: allows,
        line: String::new(),
    }
}

fn pod(name: &str, role: &str) -> PodLine {
    PodLine {
        name: Some(name.to_owned()),
        endpoint: "10.0.0.1:8000".to_owned(),
        role: role.to_owned(),
        availability: "ready".to_owned(),
        kv_source: "live".to_owned(),
        local_prefill: true,
        block_size: 16,
        cached: TierLine::default(),
        load: LoadLine::default(),
        prefill_capacity: CapacityLine::default(),
        kv_capacity: CapacityLine {
            value: Some(1000),
            source: Some("Reported".to_owned()),
        },
        engine: None,
        local: Standing::default(),
        prefill: Standing::default(),
        decode: Standing::default(),
    }
}

fn standing(total: f64, selected: bool) -> Standing {
    Standing {
        selected,
        cost: Some(CostLine {
            prefill: 6.5,
            credit: 98.5,
            decode: total - 6.5,
            requests: 0.0,
            total,
        }),
        ineligible: None,
    }
}

fn explanation() -> Explanation {
    let mut d1 = pod("d1", "decode");
    d1.cached.device = 1552;
    d1.cached.host = 16;
    d1.load.requests = 3;
    d1.engine = Some(EngineLine {
        waiting: 0,
        running: 3,
        kv_usage: 0.41,
    });
    d1.local = standing(130.0, true);
    let mut p1 = pod("prefill-1", "prefill");
    p1.local.ineligible = Some("prefill_role".to_owned());
    p1.prefill = standing(12.0, true);
    Explanation {
        decision: None,
        policy: PolicyName {
            name: "chat".to_owned(),
            generation: 3,
        },
        request: RequestLine {
            operation: Some("chat".to_owned()),
            model: Some("llama".to_owned()),
            prompt_tokens: 1980,
            counted: "exact".to_owned(),
            encode_trouble: None,
            session: "kept".to_owned(),
        },
        verdict: Verdict {
            route: "local".to_owned(),
            because: "net_new_below_thresholds".to_owned(),
            meaning: "Local, bypass: few net-new tokens, absolutely and as a share.".to_owned(),
            bypass: true,
            rule: 0,
            decode: Some(PodName {
                name: Some("d1".to_owned()),
                endpoint: "10.0.0.1:8000".to_owned(),
            }),
            prefill: None,
            checks: vec![
                check("net_new", 412.0, "<", 2048.0, true),
                check("ratio", 0.208, "<", 0.7, true),
                check("decode_busy", 0.41, "<=", 0.85, true),
            ],
            flip: Some("would not bypass if effectiveIslThreshold were at most 412".to_owned()),
        },
        shadow: None,
        pods: vec![d1, p1],
        pods_left_out: 0,
    }
}

#[test]
fn an_explanation_reads_as_the_operator_was_promised() {
    let text = render(&explanation());
    let expected = "\
request  chat · model llama · 1980 prompt tokens (exact) · session kept
policy   chat (version 3), rule 0
verdict  local, bypass: net_new_below_thresholds (few net-new tokens, absolutely and as a share)
         prefill and decode on d1 10.0.0.1:8000
checks   net_new 412 < 2048 ✓ · ratio 0.21 < 0.70 ✓ · decode busy 0.41 ≤ 0.85 ✓
flip     would not bypass if effectiveIslThreshold were at most 412

pod        role     state  kv events  cached tokens           booked               kv used       local         prefill  decode
d1         decode   ready  live       1552 +16 host +0 disk   3 req, 0 tok, 0 blk  41 % of 1000  130.0 ←       -        -
prefill-1  prefill  ready  live       0                       0 req, 0 tok, 0 blk  ? of 1000     prefill role  12.0 ←   -

cost, in blocks
local    d1: prefill 6.5 + blocks 123.5 + requests 0.0 = 130.0 (credit for cached blocks: 98.5)
prefill  prefill-1: prefill 6.5 + blocks 5.5 + requests 0.0 = 12.0 (credit for cached blocks: 98.5)
";
    let squeezed = |text: &str| {
        let lines = text
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
        lines.collect::<Vec<_>>()
    };
    assert_eq!(squeezed(&text), squeezed(expected));
    // The columns stand under each other.
    let rows: Vec<&str> = text
        .lines()
        .skip_while(|line| !line.starts_with("pod"))
        .take(3)
        .collect();
    let at = |row: &str, word: &str| row.find(word).map(|byte| row[..byte].chars().count());
    assert_eq!(at(rows[0], "cached"), at(rows[1], "1552"));
    assert_eq!(at(rows[0], "role"), at(rows[2], "prefill  ready"));
}

#[test]
fn two_different_numbers_are_never_shown_as_equal() {
    let close = check("ratio", 0.6999, "<", 0.7, true);
    assert_eq!(checks(&[close]), "ratio 0.6999 < 0.7000 ✓");
    let equal = check("ratio", 0.7, "<", 0.7, false);
    assert_eq!(checks(&[equal]), "ratio 0.70 < 0.70 ✗");
    let busy = check("prefill_busy", 1.25, ">", 1.0, true);
    assert_eq!(checks(&[busy]), "prefill busy 1.25 > 1.00 ✓");
}

#[test]
fn a_refusal_names_no_pod_and_a_shadow_that_differs_stands_out() {
    let mut explained = explanation();
    let taken = explained.verdict.clone();
    explained.verdict = Verdict {
        route: "refused".to_owned(),
        because: "no_decode_pod".to_owned(),
        meaning: "no ready decode pod".to_owned(),
        bypass: false,
        rule: 0,
        decode: None,
        prefill: None,
        checks: Vec::new(),
        flip: None,
    };
    explained.shadow = Some(ShadowVerdict {
        policy: PolicyName {
            name: "candidate".to_owned(),
            generation: 1,
        },
        agrees: false,
        verdict: taken,
    });
    let text = render(&explained);
    assert!(
        text.contains("verdict  refused: no_decode_pod (no ready decode pod)\n"),
        "{text}"
    );
    assert!(!text.contains("flip"), "{text}");
    assert!(
        text.contains("shadow   candidate (version 1), rule 0: DIFFERS; local, bypass:"),
        "{text}"
    );
}
