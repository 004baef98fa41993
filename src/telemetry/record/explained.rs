//! A record in the form in which a request is explained.
//!
//! Lives here: [`Record::explanation`].
//! Never here: anything that a record does not hold.
//! Invariant: what is no longer known is absent.

use crate::names::Endpoint;
use crate::telemetry::explanation::{
    Explanation, PodLine, PodName, PolicyName, RequestLine, ShadowVerdict, Standing, Verdict,
};
use crate::telemetry::record::{PickRecord, Record};
use std::sync::Arc;

/// Where a pod's line says how it stands for one purpose.
type Column = fn(&mut PodLine) -> &mut Standing;

impl Record {
    /// The decision in the form in which a request is explained. Of the pods only the selected ones
    /// are known still.
    #[must_use]
    pub fn explanation(&self) -> Explanation {
        let text = |word: &str| word.to_owned();
        let named = |name: &Arc<str>, endpoint: &Endpoint| PodName {
            name: Some(text(name)),
            endpoint: endpoint.to_string(),
        };
        let bare = |endpoint: &Endpoint| PodName {
            name: None,
            endpoint: endpoint.to_string(),
        };
        let mut verdict = Verdict::routed(self.reason, self.rule, &[]);
        verdict.checks = self.checks.iter().map(Into::into).collect();
        verdict.flip.clone_from(&self.flip);
        verdict.decode = Some(named(&self.decode_pod, &self.decode));
        let prefill = self.prefill_pod.as_ref().zip(self.prefill.as_ref());
        verdict.prefill = prefill.map(|(name, endpoint)| named(name, endpoint));
        let shadow = self.shadow.get().map(|shadow| {
            let mut verdict = match shadow.verdict {
                Ok(because) => Verdict::routed(because, shadow.rule, &[]),
                Err(cause) => Verdict::refused(cause, shadow.rule),
            };
            verdict.checks = shadow.checks.iter().map(Into::into).collect();
            verdict.decode = shadow.decode.as_ref().map(bare);
            verdict.prefill = shadow.prefill.as_ref().map(bare);
            ShadowVerdict {
                policy: PolicyName {
                    name: text(&shadow.policy),
                    generation: shadow.generation,
                },
                agrees: shadow.agrees,
                verdict,
            }
        });
        let pods = self.pod_lines();
        Explanation {
            decision: Some(self.id.clone()),
            policy: PolicyName {
                name: text(&self.policy),
                generation: self.generation,
            },
            request: RequestLine {
                operation: self.operation.map(text),
                model: self.model.as_deref().map(text),
                prompt_tokens: self.prompt_tokens,
                counted: text(self.counted),
                encode_trouble: self.encode_trouble.map(text),
                session: text(self.session.as_str()),
            },
            verdict,
            shadow,
            pods_left_out: self.candidates.saturating_sub(pods.len()),
            pods,
        }
    }

    fn pod_lines(&self) -> Vec<PodLine> {
        let mut lines: Vec<PodLine> = Vec::new();
        let considered = &self.considered;
        let picks: [(&Option<PickRecord>, Column); 3] = [
            (&considered.local, |line| &mut line.local),
            (&considered.prefill, |line| &mut line.prefill),
            (&considered.decode, |line| &mut line.decode),
        ];
        for (pick, standing) in picks {
            let Some(pick) = pick else {
                continue;
            };
            let endpoint = pick.endpoint.to_string();
            let known = lines.iter().position(|line| line.endpoint == endpoint);
            let at = known.unwrap_or_else(|| {
                let name = match () {
                    () if pick.endpoint == self.decode => Some(self.decode_pod.to_string()),
                    () if Some(pick.endpoint) == self.prefill => {
                        self.prefill_pod.as_deref().map(str::to_owned)
                    }
                    () => None,
                };
                lines.push(PodLine::new(&pick.candidate, name));
                lines.len() - 1
            });
            if let Some(line) = lines.get_mut(at) {
                *standing(line) = Standing {
                    selected: true,
                    cost: Some(pick.cost),
                    ineligible: None,
                };
            }
        }
        lines
    }
}
