//! Every shape on its own; whole captures are read in `tests/it/kv_captures.rs`.

use super::*;
use crate::kv::encode;
use proptest::prelude::*;

fn stored() -> Stored {
    Stored {
        hashes: vec![EngineHash(u64::MAX), EngineHash(7)],
        parent: Some(EngineHash(1 << 63)),
        tokens: vec![0, 127, 128, 65_536],
        block_size: 2,
        group: Some(0),
        attention: Attention::Full,
        ..Stored::default()
    }
}

#[test]
fn what_is_encoded_is_decoded() {
    let events = vec![
        Event::Stored(Box::new(stored())),
        Event::Stored(Box::new(Stored {
            tokens: vec![1, 2, 3],
            tokens_as: TokenForm::Pairs,
            medium: Medium::Host,
            locality: Locality::Remote,
            attention: Attention::Partial,
            adapter: Adapter::Named(Arc::from("a".repeat(300))),
            salt: Some(Arc::from("salt of more than thirty-one bytes.")),
            extra: vec![
                vec![
                    Extra::Text(Arc::from("x")),
                    Extra::Item {
                        id: Arc::from("image"),
                        offset: -2,
                    },
                ],
                vec![],
                vec![Extra::Bytes(vec![0; 300])],
            ],
            ..Stored::default()
        })),
        Event::Removed(Removed {
            hashes: (0..70_000).map(EngineHash).collect(),
            medium: Medium::Disk,
            locality: Locality::Remote,
            group: Some(3),
        }),
        Event::Cleared,
    ];
    let batch = Batch::decode(&encode::batch(1.5, &events, 3)).expect("decodes");
    assert_eq!(
        batch,
        Batch {
            ts: 1.5,
            rank: 3,
            events,
            skipped: Skipped::default()
        }
    );
}

#[test]
fn a_batch_without_a_rank_is_rank_zero() {
    let mut bytes = encode::batch(1.0, &[Event::Cleared], 0);
    bytes[0] = 0x92;
    bytes.pop();
    let batch = Batch::decode(&bytes).expect("decodes");
    assert_eq!((batch.rank, batch.events), (0, vec![Event::Cleared]));
}

#[test]
fn an_unknown_event_and_a_broken_one_cost_only_themselves() {
    let mut bytes = vec![0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x94];
    bytes.extend_from_slice(b"\x91\xb0AllBlocksCleared");
    bytes.extend_from_slice(b"\x92\xaeBlockRelocated\x81\xa1x\x92\x01\xc0");
    // token ids that are text
    bytes.extend_from_slice(b"\x85\xa4type\xabBlockStored\xacblock_hashes\x91\x01\xb1parent_block_hash\xc0\xa9token_ids\x91\xa1x\xaablock_size\x01");
    bytes.extend_from_slice(b"\x82\xa4type\xacBlockRemoved\xacblock_hashes\x91\xff");
    bytes.push(0);
    let batch = Batch::decode(&bytes).expect("decodes");
    assert_eq!(
        batch.skipped,
        Skipped {
            unknown: 1,
            malformed: 1
        }
    );
    assert_eq!(
        batch.events,
        vec![
            Event::Cleared,
            Event::Removed(Removed {
                hashes: vec![EngineHash(u64::MAX)],
                ..Removed::default()
            })
        ]
    );
}

#[test]
fn a_metadata_map_where_the_adapter_name_would_stand_carries_the_salt() {
    let mut bytes = vec![0x92, 0x00, 0x91];
    bytes.extend_from_slice(
        b"\x98\xabBlockStored\x91\x01\xc0\x91\x05\x01\xc0\xa3GPU\x81\xaacache_salt\xa1s",
    );
    let batch = Batch::decode(&bytes).expect("decodes");
    let [Event::Stored(event)] = batch.events.as_slice() else {
        panic!("one store, found {batch:?}");
    };
    assert_eq!(event.salt.as_deref(), Some("s"));
    assert_eq!(event.adapter, Adapter::None);
}

#[test]
fn what_is_not_a_batch_is_malformed() {
    for bytes in [
        &b""[..],
        b"\x90",
        b"\x91\x00",
        b"\x80",
        b"not a batch of events",
        b"\x92\xc0\x90",
        b"\x92\x00\x91\xc1",
        b"\x92\x00\xdd\xff\xff\xff\xff",
        b"\x92\x00\x90\x00",
    ] {
        assert!(Batch::decode(bytes).is_err(), "{bytes:02x?}");
    }
    let long = vec![0; MAX_PAYLOAD + 1];
    assert_eq!(
        Batch::decode(&long),
        Err(Malformed::TooLong(MAX_PAYLOAD + 1))
    );
}

#[test]
fn deep_nesting_is_stepped_over() {
    let mut bytes = vec![0x92, 0x00, 0x92];
    bytes.extend(std::iter::repeat_n(0x91, 100_000));
    bytes.push(0xc0);
    bytes.extend_from_slice(b"\x91\xb0AllBlocksCleared");
    let batch = Batch::decode(&bytes).expect("decodes");
    assert_eq!(batch.events, vec![Event::Cleared]);
    assert_eq!(batch.skipped.malformed, 1);
}

proptest! {
    #[test]
    fn any_bytes_decode_or_fail_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = Batch::decode(&bytes);
    }

    #[test]
    fn damage_never_panics(at in 0usize..200, value in any::<u8>(), cut in 0usize..200) {
        let mut bytes = encode::batch(0.0, &[Event::Stored(Box::new(stored())), Event::Cleared], 1);
        let at = at % bytes.len();
        bytes[at] = value;
        bytes.truncate(cut.max(1));
        let _ = Batch::decode(&bytes);
    }
}
