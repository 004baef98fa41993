//! How long a pass and a transfer take.
//!
//! Lives here: the cost curves, the transfer [`Link`], and the [`Pace`] that scales both.
//! Never here: a clock, a queue, a cache.
//! Invariant: every duration is finite, and a pass with work never takes less than the curves say.
//!
//! The curves are the built-in polynomials of dynamo-mocker 1.6.1 (crate `aisimulate-core`):
//! prefill `16.5 + 0.01518 n + 4.21e-7 n²` ms for `n` new tokens in the pass; decode
//! `5.74 + 54.01 u − 25.74 u²` ms, at least 1 ms, where `u` is the share of the KV capacity that the
//! decoding sequences' contexts fill. Both parts of a pass run in sequence, which is why a local
//! prefill stalls the decodes of its pod.

use crate::units::{Ratio, Tokens};
use std::time::Duration;

/// How fast simulated time runs: every modelled duration is multiplied by it.
///
/// 0 means no waiting at all. Leases are not scaled: they guard against peers, which live in real time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace(pub Ratio);

impl Pace {
    /// `duration` at this pace.
    #[must_use]
    pub fn of(self, duration: Duration) -> Duration {
        millis(duration.as_secs_f64() * self.0.get() * 1e3)
    }
}

/// The KV transfer between a prefill and a decode engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Bytes of KV cache per token, over all layers.
    pub bytes_per_token: u32,
    /// Bandwidth of the pod's link in GB/s (10^9 bytes per second); 0 is taken as instantaneous.
    pub gigabytes_per_second: Ratio,
}

impl Default for Link {
    /// 128 KiB per token (a 32-layer model, 8 KV heads of 128 in two bytes) over 25 GB/s (200 Gbit/s).
    fn default() -> Self {
        Link {
            bytes_per_token: 131_072,
            gigabytes_per_second: Ratio::new(25.0).unwrap_or(Ratio::ONE),
        }
    }
}

impl Link {
    /// Bytes that `tokens` tokens of KV take.
    #[must_use]
    pub fn bytes(&self, tokens: Tokens) -> u64 {
        tokens.0.saturating_mul(u64::from(self.bytes_per_token))
    }

    /// Time to move `tokens` tokens of KV over an otherwise idle link.
    #[must_use]
    pub fn transfer(&self, tokens: Tokens) -> Duration {
        let bandwidth = self.gigabytes_per_second.get() * 1e9;
        if bandwidth <= 0.0 {
            return Duration::ZERO;
        }
        millis(self.bytes(tokens) as f64 / bandwidth * 1e3)
    }
}

/// The prefill part of a pass with `new` uncached tokens; nothing when there are none.
#[must_use]
pub fn prefill(new: Tokens) -> Duration {
    if new == Tokens::ZERO {
        return Duration::ZERO;
    }
    let n = new.0 as f64;
    millis(16.5 + 0.01518 * n + 4.21e-7 * n * n)
}

/// The decode part of a pass whose decoding sequences hold `context` of `capacity` tokens; the
/// caller leaves it out when no sequence decodes.
#[must_use]
pub fn decode(context: Tokens, capacity: Tokens) -> Duration {
    let share = (context.0 as f64 / capacity.0.max(1) as f64).min(1.0);
    millis((5.74 + 54.01 * share - 25.74 * share * share).max(1.0))
}

/// A day bounds what absurd settings can ask for, so that clock arithmetic cannot overflow.
fn millis(value: f64) -> Duration {
    const DAY_MS: f64 = 86_400_000.0;
    Duration::try_from_secs_f64(value.clamp(0.0, DAY_MS) / 1e3).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(duration: Duration) -> f64 {
        (duration.as_secs_f64() * 1e4).round() / 10.0
    }

    #[test]
    fn curves_pass_through_their_published_points() {
        assert_eq!(ms(prefill(Tokens(2_048))), 49.4);
        assert_eq!(ms(prefill(Tokens(8_192))), 169.1);
        assert_eq!(ms(prefill(Tokens(32_768))), 966.0);
        assert_eq!(ms(decode(Tokens(0), Tokens(1_000))), 5.7);
        assert_eq!(ms(decode(Tokens(500), Tokens(1_000))), 26.3);
        assert_eq!(ms(decode(Tokens(1_000), Tokens(1_000))), 34.0);
    }

    #[test]
    fn nothing_to_prefill_costs_nothing() {
        assert_eq!(prefill(Tokens::ZERO), Duration::ZERO);
    }

    #[test]
    fn a_transfer_takes_bytes_over_bandwidth() {
        let link = Link {
            bytes_per_token: 100_000,
            gigabytes_per_second: Ratio::ONE,
        };
        assert_eq!(link.transfer(Tokens(1_000)), Duration::from_millis(100));
        let instantaneous = Link {
            gigabytes_per_second: Ratio::ZERO,
            ..link
        };
        assert_eq!(instantaneous.transfer(Tokens(1_000)), Duration::ZERO);
    }

    #[test]
    fn pace_scales_and_zero_does_not_wait() {
        let pace = |scale| Pace(Ratio::new(scale).expect("a ratio"));
        let second = Duration::from_secs(1);
        assert_eq!(pace(0.25).of(second), Duration::from_millis(250));
        assert_eq!(pace(0.0).of(second), Duration::ZERO);
        assert!(pace(f64::MAX).of(second) <= Duration::from_secs(86_400));
    }

    #[test]
    fn absurd_sizes_stay_finite() {
        let day = Duration::from_secs(86_400);
        assert!(prefill(Tokens(u64::MAX)) <= day);
        assert!(Link::default().transfer(Tokens(u64::MAX)) <= day);
        assert!(decode(Tokens(u64::MAX), Tokens::ZERO) <= day);
    }
}
