use super::*;

fn hashes(space: &Space, tokens: &[u32]) -> Vec<BlockHash> {
    let mut parent = None;
    tokens
        .chunks_exact(2)
        .map(|block| {
            let hash = space.hash(parent, block);
            parent = Some(hash);
            hash
        })
        .collect()
}

/// Computes the blocks of `tokens` (two per block) and gives them back.
fn fill(pool: &mut Pool, tokens: &[u32]) -> Vec<BlockHash> {
    let space = Arc::new(Space::default());
    let hashes = hashes(&space, tokens);
    let blocks = pool.take(&[], hashes.len()).expect("the pool has room");
    let pairs: Vec<_> = blocks.iter().copied().zip(hashes.iter().copied()).collect();
    pool.store(None, &pairs, tokens, &space);
    pool.give_back(&blocks);
    hashes
}

#[test]
fn given_back_blocks_are_found_again() {
    let mut pool = Pool::new(4);
    let held = fill(&mut pool, &[1, 2, 3, 4]);
    assert_eq!(pool.held(&held), 2);
    assert_eq!(pool.used(), 0);
    let blocks = pool.take(&held, 1).expect("room");
    assert_eq!((blocks.len(), pool.used()), (3, 3));
}

#[test]
fn eviction_takes_the_oldest_sequence_from_its_tail_and_says_so() {
    let mut pool = Pool::new(4);
    let old = fill(&mut pool, &[1, 2, 3, 4]);
    let new = fill(&mut pool, &[5, 6, 7, 8]);
    pool.drain();
    let taken = pool.take(&[], 1).expect("room");
    assert_eq!(pool.drain(), vec![Change::Removed(old[1])]);
    assert_eq!((pool.held(&old), pool.held(&new)), (1, 2));
    pool.give_back(&taken);
}

#[test]
fn reuse_makes_a_sequence_young_again() {
    let mut pool = Pool::new(4);
    let first = fill(&mut pool, &[1, 2, 3, 4]);
    let second = fill(&mut pool, &[5, 6, 7, 8]);
    let blocks = pool.take(&first, 0).expect("room");
    pool.give_back(&blocks);
    pool.take(&[], 2).expect("room");
    assert_eq!((pool.held(&first), pool.held(&second)), (2, 0));
}

#[test]
fn a_used_block_is_never_evicted() {
    let mut pool = Pool::new(2);
    let held = fill(&mut pool, &[1, 2]);
    let used = pool.take(&held, 0).expect("room");
    assert_eq!(pool.take(&[], 2), None);
    assert!(pool.take(&[], 1).is_some());
    assert_eq!(pool.held(&held), 1);
    assert_eq!(used.len(), 1);
}

#[test]
fn hits_that_would_be_evicted_to_make_room_for_their_own_tail_do_not_count_as_room() {
    let mut pool = Pool::new(2);
    let held = fill(&mut pool, &[1, 2, 3, 4]);
    assert_eq!(pool.take(&held, 1), None);
    assert_eq!(pool.held(&held), 2);
}

#[test]
fn two_copies_of_one_block_are_announced_and_withdrawn_twice() {
    let mut pool = Pool::new(2);
    let space = Arc::new(Space::default());
    let hash = space.hash(None, &[1, 2]);
    let blocks = pool.take(&[], 2).expect("room");
    pool.store(None, &[(blocks[0], hash)], &[1, 2], &space);
    pool.store(None, &[(blocks[1], hash)], &[1, 2], &space);
    pool.give_back(&blocks);
    assert_eq!(pool.drain().len(), 2);
    pool.take(&[], 1).expect("room");
    assert_eq!(pool.drain(), vec![Change::Removed(hash)]);
    assert_eq!(pool.held(&[hash]), 1);
}

#[test]
fn clearing_waits_for_the_last_user() {
    let mut pool = Pool::new(2);
    let held = fill(&mut pool, &[1, 2]);
    let used = pool.take(&held, 0).expect("room");
    assert!(!pool.clear());
    pool.give_back(&used);
    pool.drain();
    assert!(pool.clear());
    assert_eq!(pool.held(&held), 0);
    assert_eq!(pool.drain(), vec![Change::Cleared]);
}

#[test]
fn salt_and_adapter_separate_content() {
    let plain = Space::default();
    let salted = Space {
        salt: Some("a".into()),
        ..Space::default()
    };
    let adapted = Space {
        adapter: Some("a".into()),
        ..Space::default()
    };
    let of = |space: &Space| space.hash(None, &[1, 2]);
    assert_ne!(of(&plain), of(&salted));
    assert_ne!(of(&plain), of(&adapted));
    assert_ne!(of(&salted), of(&adapted));
    let parent = of(&plain);
    assert_eq!(
        plain.hash(Some(parent), &[3]),
        salted.hash(Some(parent), &[3]),
        "the salt enters through the first block"
    );
}
