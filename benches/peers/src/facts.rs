//! What both sides are told: pods, what runs on them and what they hold, all from one fixed generator.
//!
//! The prompt is 2,048 tokens in blocks of 16. Every pod holds some of it and runs some requests, all
//! of which begin with the same system prompt, as the measured one does.

/// Tokens per block.
pub const BLOCK: u32 = 16;
/// Blocks of the prompt.
pub const PROMPT: u32 = 128;
/// Blocks of the system prompt that every request begins with.
pub const SYSTEM: u32 = 32;
/// KV blocks of a pod.
pub const CAPACITY: u32 = 131_072;

/// Which pods take which half of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fleet {
    /// One pod in four prefills, the others decode.
    Split,
    /// Every pod takes both halves.
    Both,
}

/// How much both sides are told of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// Loads and how much of the prompt each pod holds.
    Loads,
    /// That, and the prompt's blocks, so that those in use by running requests count once; the
    /// blocks held are also told per tier.
    Blocks,
}

/// One half of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    Prefill,
    Decode,
}

pub struct Pod {
    pub id: u16,
    pub prefills: bool,
    pub decodes: bool,
    /// Leading blocks of the prompt that it holds.
    pub held: u32,
    pub running: Vec<Running>,
}

/// A request that runs on a pod, its prefill not yet done.
pub struct Running {
    pub id: u32,
    pub blocks: u32,
    /// How many of them the pod held when the request came.
    pub held: u32,
}

impl Running {
    pub fn prefill_tokens(&self) -> u32 {
        (self.blocks - self.held) * BLOCK
    }
}

impl Pod {
    pub fn takes(&self, half: Half) -> bool {
        match half {
            Half::Prefill => self.prefills,
            Half::Decode => self.decodes,
        }
    }

    pub fn prefill_tokens(&self) -> u32 {
        self.running.iter().map(Running::prefill_tokens).sum()
    }

    /// Distinct blocks of what runs here.
    pub fn blocks(&self) -> u32 {
        let private = self.running.iter().map(|running| running.blocks - SYSTEM);
        SYSTEM + private.sum::<u32>()
    }

    /// What both sides compare, but for what is the same for every pod: tokens to be prefilled
    /// before the request, or blocks in use, less what the pod holds.
    pub fn cost(&self, half: Half) -> f64 {
        let load = match half {
            Half::Prefill => f64::from(self.prefill_tokens()) / f64::from(BLOCK),
            Half::Decode => f64::from(self.blocks()),
        };
        load - f64::from(self.held)
    }
}

pub fn pods(count: u16, fleet: Fleet) -> Vec<Pod> {
    let mut rng = Rng(42);
    let mut requests = 0;
    (0..count)
        .map(|id| Pod {
            id,
            prefills: fleet == Fleet::Both || id % 4 == 0,
            decodes: fleet == Fleet::Both || id % 4 != 0,
            held: rng.between(1, PROMPT),
            running: (0..rng.between(2, 5))
                .map(|_| {
                    requests += 1;
                    let blocks = rng.between(96, PROMPT + 1);
                    Running {
                        id: requests,
                        blocks,
                        held: rng.between(SYSTEM, blocks),
                    }
                })
                .collect(),
        })
        .collect()
}

/// Contents of the blocks of request `id`; the measured one is 0.
pub fn contents(id: u32, blocks: u32) -> impl Iterator<Item = u64> {
    (0..blocks).map(move |at| {
        let owner = if at < SYSTEM { u32::MAX } else { id };
        mix((u64::from(owner) << 32) | u64::from(at))
    })
}

/// `SplitMix64`.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// Uniform in `low..high`.
    fn between(&mut self, low: u32, high: u32) -> u32 {
        low + self.below((high - low) as usize) as u32
    }

    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next()) * n as u128) >> 64) as usize
    }

    /// The numbers below `N` in a drawn order.
    pub fn order<const N: usize>(&mut self) -> [usize; N] {
        let mut order = std::array::from_fn(|at| at);
        (1..N).for_each(|at| order.swap(at, self.below(at + 1)));
        order
    }

    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
