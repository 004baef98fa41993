//! The bytes of a request, held until its pod is chosen.
//!
//! Lives here: bounded collection of chunks, slicing into reply chunks, decoding of a copy.
//! Never here: JSON; what the bytes mean is the picker's business.
//! Invariant: never more than the limit is held or decoded, and the chunks that go back join to
//! exactly the bytes that came.

use crate::pick::{Headers, Refusal};
use bytes::{Bytes, BytesMut};
use std::io::{self, Read};

/// Most bytes in one reply. Envoy advises messages of at most 64 KiB; this leaves room for framing.
pub const CHUNK: usize = 62_000;

/// Chunks as they come, up to a limit.
#[derive(Debug)]
pub struct Body {
    limit: usize,
    /// What the client says the length is, for one allocation instead of many.
    expected: usize,
    parts: Parts,
}

/// One chunk is kept as it came; from the second on they are copied together.
#[derive(Debug)]
enum Parts {
    None,
    One(Bytes),
    Many(BytesMut),
}

/// The body is longer than the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("body: expected at most {limit} bytes, found more")]
pub struct TooLong {
    limit: usize,
}

impl From<TooLong> for Refusal {
    fn from(TooLong { limit }: TooLong) -> Refusal {
        Refusal::new(
            413,
            "body_too_large",
            format!("request body: expected at most {limit} bytes, found more"),
        )
    }
}

impl Body {
    /// An empty body of at most `limit` bytes, of which `expected` were announced.
    #[must_use]
    pub fn new(limit: usize, expected: Option<usize>) -> Body {
        Body {
            limit,
            expected: expected.unwrap_or(0).min(limit),
            parts: Parts::None,
        }
    }

    /// Bytes held.
    #[must_use]
    pub fn len(&self) -> usize {
        match &self.parts {
            Parts::None => 0,
            Parts::One(bytes) => bytes.len(),
            Parts::Many(bytes) => bytes.len(),
        }
    }

    /// Whether nothing is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds `chunk`.
    ///
    /// # Errors
    /// When that would be more than the limit; what was held is kept.
    pub fn push(&mut self, chunk: Bytes) -> Result<(), TooLong> {
        if chunk.is_empty() {
            return Ok(());
        }
        let total = self.len().saturating_add(chunk.len());
        if self.limit < total {
            return Err(TooLong { limit: self.limit });
        }
        self.parts = match std::mem::replace(&mut self.parts, Parts::None) {
            Parts::None => Parts::One(chunk),
            Parts::One(first) => {
                let mut all = BytesMut::with_capacity(total.max(self.expected));
                all.extend_from_slice(&first);
                all.extend_from_slice(&chunk);
                Parts::Many(all)
            }
            Parts::Many(mut all) => {
                all.extend_from_slice(&chunk);
                Parts::Many(all)
            }
        };
        Ok(())
    }

    /// All bytes, in one piece.
    #[must_use]
    pub fn into_bytes(self) -> Bytes {
        match self.parts {
            Parts::None => Bytes::new(),
            Parts::One(bytes) => bytes,
            Parts::Many(bytes) => bytes.freeze(),
        }
    }
}

/// `bytes` in pieces of at most [`CHUNK`], none for no bytes; slices, not copies.
pub fn chunks(mut bytes: Bytes) -> impl Iterator<Item = Bytes> {
    std::iter::from_fn(move || (!bytes.is_empty()).then(|| bytes.split_to(bytes.len().min(CHUNK))))
}

/// How a body is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// Not at all.
    Identity,
    /// `gzip`.
    Gzip,
    /// `deflate`: zlib, or the bare stream that some clients send under this name.
    Deflate,
    /// Anything else, or several at once.
    Unreadable,
}

impl Encoding {
    /// What `content-encoding` says.
    #[must_use]
    pub fn of(headers: &Headers) -> Encoding {
        let mut found = Encoding::Identity;
        let named = headers
            .get_all("content-encoding")
            .flat_map(|value| value.split(','))
            .map(str::trim);
        for name in named {
            let one = match name.to_ascii_lowercase().as_str() {
                "" | "identity" => continue,
                "gzip" | "x-gzip" => Encoding::Gzip,
                "deflate" => Encoding::Deflate,
                _ => Encoding::Unreadable,
            };
            found = match found {
                Encoding::Identity => one,
                _ => Encoding::Unreadable,
            };
        }
        found
    }

    /// The header's word.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Encoding::Identity => "identity",
            Encoding::Gzip => "gzip",
            Encoding::Deflate => "deflate",
            Encoding::Unreadable => "unreadable",
        }
    }
}

/// A decoded copy of `bytes`, of at most `limit` bytes. CPU-bound: not for an I/O thread.
///
/// # Errors
/// 413 when the copy would be longer than `limit`, 400 when the bytes are not what `encoding` says.
pub fn decode(bytes: &Bytes, encoding: Encoding, limit: usize) -> Result<Bytes, Refusal> {
    match encoding {
        Encoding::Identity | Encoding::Unreadable => Ok(bytes.clone()),
        Encoding::Gzip => read(
            flate2::read::MultiGzDecoder::new(&bytes[..]),
            limit,
            encoding,
        ),
        Encoding::Deflate if is_zlib(bytes) => {
            read(flate2::read::ZlibDecoder::new(&bytes[..]), limit, encoding)
        }
        Encoding::Deflate => read(
            flate2::read::DeflateDecoder::new(&bytes[..]),
            limit,
            encoding,
        ),
    }
}

/// Whether `bytes` begin as RFC 1950 says.
fn is_zlib(bytes: &[u8]) -> bool {
    matches!(bytes, [method, flags, ..]
        if method & 0x0f == 8 && u16::from_be_bytes([*method, *flags]).is_multiple_of(31))
}

fn read(decoder: impl Read, limit: usize, encoding: Encoding) -> Result<Bytes, Refusal> {
    let mut out = Vec::new();
    let most = u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1);
    match decoder.take(most).read_to_end(&mut out) {
        Ok(_) if limit < out.len() => Err(TooLong { limit }.into()),
        Ok(_) => Ok(out.into()),
        Err(error) => Err(malformed(encoding, &error)),
    }
}

fn malformed(encoding: Encoding, error: &io::Error) -> Refusal {
    let how = match error.kind() {
        io::ErrorKind::UnexpectedEof => "a body that ends too early",
        _ => "other bytes",
    };
    Refusal::new(
        400,
        "malformed_content_encoding",
        format!(
            "request body: expected content-encoding {}, found {how}",
            encoding.as_str()
        ),
    )
}

#[cfg(test)]
mod tests;
