//! Any bytes as a request body: read, rendered, tokenized and chained without a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidestep::prompt::{Api, BodyError, Counted, Encoder, Profile, Profiles, parse};
use sidestep::units::BlockSize;
use std::sync::LazyLock;

/// The built-in model under the name `m`, so that a fuzzer finds it.
static ENCODER: LazyLock<Encoder> = LazyLock::new(|| {
    let profile = Profile::builtin().expect("the built-in model loads");
    let profile = profile.named("m".into(), vec!["a".into()]);
    Encoder::new(Profiles::new(vec![profile]).expect("one model"), 1 << 20)
});

fuzz_target!(|body: &[u8]| {
    let size = BlockSize::new(16).expect("16 tokens make a block");
    for api in [Api::ChatCompletions, Api::Completions] {
        match parse(api, body) {
            Ok(request) => {
                let prompt = ENCODER.encode(&request, &[size]);
                if prompt.counted == Counted::Exact {
                    let full = prompt.tokens.0 / u64::from(size.get());
                    let chained = prompt.chains.first().map_or(0, |chain| chain.keys.len());
                    // A batch is chained by its first prompt only.
                    assert!(chained as u64 <= full);
                }
            }
            Err(BodyError::Syntax { offset, .. } | BodyError::Wrong { offset, .. }) => {
                assert!(offset <= body.len());
            }
            Err(_) => {}
        }
    }
});
