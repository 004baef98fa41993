//! Chunks, encodings, limits.
use super::*;
use std::io::Write;

fn gzip(bytes: &[u8]) -> Bytes {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap().into()
}

fn encoding(values: &[&'static str]) -> Encoding {
    let mut headers = Headers::default();
    for value in values {
        headers.push("Content-Encoding", *value);
    }
    Encoding::of(&headers)
}

#[test]
fn chunks_join_to_what_was_pushed_up_to_the_limit_and_not_beyond() {
    let mut body = Body::new(10, Some(1_000_000));
    for chunk in ["abc", "", "defg", "hij"] {
        body.push(Bytes::from_static(chunk.as_bytes())).unwrap();
    }
    assert_eq!(
        body.push(Bytes::from_static(b"k")),
        Err(TooLong { limit: 10 })
    );
    assert_eq!(body.len(), 10);
    assert_eq!(&body.into_bytes()[..], b"abcdefghij");
}

#[test]
fn a_single_chunk_is_kept_without_a_copy() {
    let chunk = Bytes::from(vec![7; 1_000]);
    let mut body = Body::new(1_000, None);
    body.push(chunk.clone()).unwrap();
    assert_eq!(body.into_bytes().as_ptr(), chunk.as_ptr());
}

#[test]
fn reply_chunks_are_slices_below_64_kib_that_join_to_the_body() {
    for size in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 64 << 10, 10 << 20] {
        let body = Bytes::from((0..size).map(|i| (i % 251) as u8).collect::<Vec<_>>());
        let pieces: Vec<_> = chunks(body.clone()).collect();
        assert_eq!(pieces.len(), size.div_ceil(CHUNK));
        assert!(pieces.iter().all(|piece| piece.len() <= CHUNK));
        assert_eq!(pieces.concat(), body);
        if let Some(first) = pieces.first() {
            assert_eq!(first.as_ptr(), body.as_ptr());
        }
    }
}

#[test]
fn content_encoding_is_read_in_every_spelling() {
    assert_eq!(encoding(&[]), Encoding::Identity);
    assert_eq!(encoding(&["identity"]), Encoding::Identity);
    assert_eq!(encoding(&["GZIP"]), Encoding::Gzip);
    assert_eq!(encoding(&["identity, x-gzip"]), Encoding::Gzip);
    assert_eq!(encoding(&["deflate"]), Encoding::Deflate);
    assert_eq!(encoding(&["br"]), Encoding::Unreadable);
    assert_eq!(encoding(&["gzip", "gzip"]), Encoding::Unreadable);
}

#[test]
fn gzip_and_both_kinds_of_deflate_decode() {
    let text = b"{\"model\":\"m\"}".repeat(100);
    let mut zlib = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
    zlib.write_all(&text).unwrap();
    let mut bare = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::fast());
    bare.write_all(&text).unwrap();
    for (bytes, encoding) in [
        (gzip(&text), Encoding::Gzip),
        (zlib.finish().unwrap().into(), Encoding::Deflate),
        (bare.finish().unwrap().into(), Encoding::Deflate),
    ] {
        assert_eq!(decode(&bytes, encoding, text.len()).unwrap(), text);
    }
}

#[test]
fn bytes_that_are_not_gzip_are_a_400_that_names_the_encoding_and_not_the_bytes() {
    let whole = gzip(&[b'x'; 4_096]);
    for bytes in [
        Bytes::from_static(b"SECRET-4711"),
        Bytes::new(),
        whole.slice(..whole.len() - 4),
    ] {
        let refusal = decode(&bytes, Encoding::Gzip, 8_192).unwrap_err();
        assert_eq!(refusal.status, 400);
        assert!(refusal.message.contains("gzip"));
        assert!(!refusal.to_json().contains("SECRET"));
    }
}

#[test]
fn a_bomb_is_a_413_after_no_more_than_the_limit_was_decoded() {
    let bomb = gzip(&vec![0; 64 << 20]);
    assert!(bomb.len() < 100_000);
    let refusal = decode(&bomb, Encoding::Gzip, 1 << 20).unwrap_err();
    assert_eq!((refusal.status, refusal.code), (413, "body_too_large"));
}
