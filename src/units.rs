//! Quantities with their units, so that a token count can never be passed as a block count.
//!
//! Lives here: [`Tokens`], [`Blocks`], [`BlockSize`], [`Ratio`].
//! Never here: I/O, policy, anything that knows a pod.
//! Invariant: a value of these types is always meaningful (a [`Ratio`] is finite and not negative,
//! a [`BlockSize`] is at least one token).

use std::fmt;
use std::num::NonZeroU32;

/// A number of tokens.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    serde::Serialize,
    serde::Deserialize,
)]
#[serde(transparent)]
pub struct Tokens(pub u64);

impl Tokens {
    /// No tokens.
    pub const ZERO: Tokens = Tokens(0);

    /// `self - other`, or zero when `other` is larger.
    #[must_use]
    pub fn saturating_sub(self, other: Tokens) -> Tokens {
        Tokens(self.0.saturating_sub(other.0))
    }

    /// `self + other`, saturating.
    #[must_use]
    pub fn saturating_add(self, other: Tokens) -> Tokens {
        Tokens(self.0.saturating_add(other.0))
    }
}

impl fmt::Display for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A number of KV-cache blocks.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    serde::Serialize,
    serde::Deserialize,
)]
#[serde(transparent)]
pub struct Blocks(pub u32);

impl Blocks {
    /// No blocks.
    pub const ZERO: Blocks = Blocks(0);

    /// `self - other`, or zero when `other` is larger.
    #[must_use]
    pub fn saturating_sub(self, other: Blocks) -> Blocks {
        Blocks(self.0.saturating_sub(other.0))
    }

    /// `self + other`, saturating.
    #[must_use]
    pub fn saturating_add(self, other: Blocks) -> Blocks {
        Blocks(self.0.saturating_add(other.0))
    }
}

impl fmt::Display for Blocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Tokens per KV-cache block; at least one.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(transparent)]
pub struct BlockSize(NonZeroU32);

impl BlockSize {
    /// Assumed of an engine that has not said its own: vLLM's default on accelerators.
    pub const DEFAULT: BlockSize = BlockSize(NonZeroU32::MIN.saturating_add(15));

    /// A block size of `tokens`, or `None` for zero.
    #[must_use]
    pub fn new(tokens: u32) -> Option<BlockSize> {
        NonZeroU32::new(tokens).map(BlockSize)
    }

    /// Tokens per block.
    #[must_use]
    pub fn get(self) -> u32 {
        self.0.get()
    }

    /// The tokens that `blocks` full blocks hold.
    #[must_use]
    pub fn tokens(self, blocks: Blocks) -> Tokens {
        Tokens(u64::from(self.get()) * u64::from(blocks.0))
    }

    /// Blocks needed to hold `tokens`, the last one possibly partial.
    #[must_use]
    pub fn blocks_to_hold(self, tokens: Tokens) -> Blocks {
        Blocks(u32::try_from(tokens.0.div_ceil(u64::from(self.get()))).unwrap_or(u32::MAX))
    }

    /// Full blocks in `tokens`.
    #[must_use]
    pub fn full_blocks(self, tokens: Tokens) -> Blocks {
        Blocks(u32::try_from(tokens.0 / u64::from(self.get())).unwrap_or(u32::MAX))
    }
}

impl fmt::Display for BlockSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A finite number of at least 0: a share, a weight or a load factor.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, serde::Serialize)]
#[serde(transparent)]
pub struct Ratio(f64);

impl Ratio {
    /// Zero.
    pub const ZERO: Ratio = Ratio(0.0);
    /// One.
    pub const ONE: Ratio = Ratio(1.0);

    /// `value` as a ratio, or `None` when it is NaN, infinite or negative.
    #[must_use]
    pub fn new(value: f64) -> Option<Ratio> {
        (value.is_finite() && 0.0 <= value).then_some(Ratio(value))
    }

    /// The number.
    #[must_use]
    pub fn get(self) -> f64 {
        self.0
    }
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
