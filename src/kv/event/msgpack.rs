//! A cursor over MessagePack bytes (<https://github.com/msgpack/msgpack/blob/master/spec.md>).
//!
//! Lives here: reading one value at a time without copying, and skipping any value.
//! Never here: what the values mean.
//! Invariant: never reads past the end, never recurses, and trusts no length before checking that
//! the bytes for it are there.

use super::Malformed;

/// Small things that one payload may make us allocate; far beyond any real one.
const SMALL_ALLOCATIONS: u32 = 2_000_000;

/// Position in a payload.
#[derive(Clone, Copy)]
pub(super) struct Reader<'a> {
    buf: &'a [u8],
    at: usize,
    /// Allocations still allowed, so that one-byte values cannot cost a hundred times their size.
    budget: u32,
}

type Read<T> = Result<T, Malformed>;

impl<'a> Reader<'a> {
    pub(super) fn new(buf: &'a [u8]) -> Reader<'a> {
        Reader {
            buf,
            at: 0,
            budget: SMALL_ALLOCATIONS,
        }
    }

    /// Accounts for one small allocation.
    pub(super) fn spend(&mut self, expected: &'static str) -> Read<()> {
        match self.budget.checked_sub(1) {
            Some(left) => {
                self.budget = left;
                Ok(())
            }
            None => Err(self.unexpected(expected)),
        }
    }

    pub(super) fn is_at_end(&self) -> bool {
        self.at == self.buf.len()
    }

    /// The bytes from `start` up to here.
    pub(super) fn since(&self, start: Reader<'a>) -> &'a [u8] {
        self.buf.get(start.at..self.at).unwrap_or_default()
    }

    fn remaining(&self) -> usize {
        self.buf.len() - self.at
    }

    pub(super) fn marker(&self, expected: &'static str) -> Read<u8> {
        match self.buf.get(self.at) {
            Some(marker) => Ok(*marker),
            None => Err(Malformed::Truncated {
                expected,
                at: self.at,
            }),
        }
    }

    pub(super) fn unexpected(&self, expected: &'static str) -> Malformed {
        match self.buf.get(self.at) {
            Some(found) => Malformed::Unexpected {
                expected,
                at: self.at,
                found: *found,
            },
            None => Malformed::Truncated {
                expected,
                at: self.at,
            },
        }
    }

    fn take(&mut self, len: usize, expected: &'static str) -> Read<&'a [u8]> {
        let end = self.at.checked_add(len);
        let bytes = end.and_then(|end| self.buf.get(self.at..end));
        let bytes = bytes.ok_or(Malformed::Truncated {
            expected,
            at: self.at,
        })?;
        self.at += len;
        Ok(bytes)
    }

    /// A big-endian number of `len` bytes after the marker.
    fn wide(&mut self, len: usize, expected: &'static str) -> Read<u64> {
        let bytes = self.take(len + 1, expected)?;
        Ok(bytes[1..]
            .iter()
            .fold(0, |value, byte| (value << 8) | u64::from(*byte)))
    }

    /// A length after the marker; checked against the bytes left, one per element at least.
    fn wide_len(&mut self, len: usize, expected: &'static str) -> Read<usize> {
        let value = self.wide(len, expected)?;
        self.checked_len(value, expected)
    }

    fn checked_len(&self, value: u64, expected: &'static str) -> Read<usize> {
        match usize::try_from(value) {
            Ok(value) if value <= self.remaining() => Ok(value),
            _ => Err(Malformed::Truncated {
                expected,
                at: self.buf.len(),
            }),
        }
    }

    /// Steps over a nil, if one is next.
    pub(super) fn nil(&mut self) -> bool {
        let is_nil = self.buf.get(self.at) == Some(&0xc0);
        self.at += usize::from(is_nil);
        is_nil
    }

    pub(super) fn is_array(&self) -> bool {
        matches!(self.buf.get(self.at), Some(0x90..=0x9f | 0xdc | 0xdd))
    }

    pub(super) fn is_map(&self) -> bool {
        matches!(self.buf.get(self.at), Some(0x80..=0x8f | 0xde | 0xdf))
    }

    pub(super) fn is_text(&self) -> bool {
        matches!(self.buf.get(self.at), Some(0xa0..=0xbf | 0xd9..=0xdb))
    }

    pub(super) fn is_bytes(&self) -> bool {
        matches!(self.buf.get(self.at), Some(0xc4..=0xc6))
    }

    /// The number of elements of an array.
    pub(super) fn array(&mut self, expected: &'static str) -> Read<usize> {
        match self.marker(expected)? {
            marker @ 0x90..=0x9f => {
                self.at += 1;
                self.checked_len(u64::from(marker & 0x0f), expected)
            }
            0xdc => self.wide_len(2, expected),
            0xdd => self.wide_len(4, expected),
            _ => Err(self.unexpected(expected)),
        }
    }

    /// The number of pairs of a map.
    pub(super) fn map(&mut self, expected: &'static str) -> Read<usize> {
        match self.marker(expected)? {
            marker @ 0x80..=0x8f => {
                self.at += 1;
                self.checked_len(2 * u64::from(marker & 0x0f), expected)
                    .map(|values| values / 2)
            }
            0xde => self.wide_len(2, expected),
            0xdf => self.wide_len(4, expected),
            _ => Err(self.unexpected(expected)),
        }
    }

    pub(super) fn text(&mut self, expected: &'static str) -> Read<&'a str> {
        let start = *self;
        let len = match self.marker(expected)? {
            marker @ 0xa0..=0xbf => {
                self.at += 1;
                usize::from(marker & 0x1f)
            }
            0xd9 => self.wide_len(1, expected)?,
            0xda => self.wide_len(2, expected)?,
            0xdb => self.wide_len(4, expected)?,
            _ => return Err(self.unexpected(expected)),
        };
        let bytes = self.take(len, expected)?;
        std::str::from_utf8(bytes).map_err(|_| start.unexpected(expected))
    }

    pub(super) fn bytes(&mut self, expected: &'static str) -> Read<&'a [u8]> {
        let len = match self.marker(expected)? {
            0xc4 => self.wide_len(1, expected)?,
            0xc5 => self.wide_len(2, expected)?,
            0xc6 => self.wide_len(4, expected)?,
            _ => return Err(self.unexpected(expected)),
        };
        self.take(len, expected)
    }

    /// An integer's 64-bit pattern: two's complement when negative.
    pub(super) fn bits(&mut self, expected: &'static str) -> Read<u64> {
        let marker = self.marker(expected)?;
        match marker {
            0x00..=0x7f => {
                self.at += 1;
                Ok(u64::from(marker))
            }
            0xe0..=0xff => {
                self.at += 1;
                Ok(i64::from(marker.cast_signed()).cast_unsigned())
            }
            0xcc => self.wide(1, expected),
            0xcd => self.wide(2, expected),
            0xce => self.wide(4, expected),
            0xcf | 0xd3 => self.wide(8, expected),
            0xd0 => Ok(sign_extend(self.wide(1, expected)?, 8)),
            0xd1 => Ok(sign_extend(self.wide(2, expected)?, 16)),
            0xd2 => Ok(sign_extend(self.wide(4, expected)?, 32)),
            _ => Err(self.unexpected(expected)),
        }
    }

    /// An integer that fits in `i64`.
    pub(super) fn int(&mut self, expected: &'static str) -> Read<i64> {
        let start = *self;
        let unsigned = self.marker(expected)? == 0xcf;
        let value = self.bits(expected)?.cast_signed();
        if unsigned && value < 0 {
            return Err(start.unexpected(expected));
        }
        Ok(value)
    }

    /// An integer from 0 to `u32::MAX`.
    #[inline]
    pub(super) fn u32(&mut self, expected: &'static str) -> Read<u32> {
        let start = *self;
        let value = self.int(expected)?;
        u32::try_from(value).map_err(|_| start.unexpected(expected))
    }

    /// A float, or an integer where the writer had a whole number.
    pub(super) fn float(&mut self, expected: &'static str) -> Read<f64> {
        match self.marker(expected)? {
            0xcb => Ok(f64::from_bits(self.wide(8, expected)?)),
            0xca => {
                let bits = self.wide(4, expected)?;
                Ok(f64::from(f32::from_bits(
                    u32::try_from(bits).unwrap_or_default(),
                )))
            }
            #[allow(clippy::cast_precision_loss)] // a time in seconds
            _ => self.int(expected).map(|value| value as f64),
        }
    }

    /// Steps over one value of any kind, however deeply nested.
    pub(super) fn skip(&mut self) -> Read<()> {
        const WHAT: &str = "a value";
        let mut left = 1usize;
        while 0 < left {
            left -= 1;
            let marker = self.marker(WHAT)?;
            match marker {
                0x00..=0x7f | 0xe0..=0xff | 0xc0 | 0xc2 | 0xc3 => self.at += 1,
                0x80..=0x8f | 0xde | 0xdf => left += 2 * self.map(WHAT)?,
                0x90..=0x9f | 0xdc | 0xdd => left += self.array(WHAT)?,
                0xa0..=0xbf => drop(self.take(1 + usize::from(marker & 0x1f), WHAT)?),
                0xcc | 0xd0 => drop(self.take(2, WHAT)?),
                0xcd | 0xd1 | 0xd4 => drop(self.take(3, WHAT)?),
                0xd5 => drop(self.take(4, WHAT)?),
                0xca | 0xce | 0xd2 => drop(self.take(5, WHAT)?),
                0xd6 => drop(self.take(6, WHAT)?),
                0xcb | 0xcf | 0xd3 => drop(self.take(9, WHAT)?),
                0xd7 => drop(self.take(10, WHAT)?),
                0xd8 => drop(self.take(18, WHAT)?),
                0xc4 | 0xd9 => self.skip_sized(1, 0)?,
                0xc5 | 0xda => self.skip_sized(2, 0)?,
                0xc6 | 0xdb => self.skip_sized(4, 0)?,
                0xc7 => self.skip_sized(1, 1)?,
                0xc8 => self.skip_sized(2, 1)?,
                0xc9 => self.skip_sized(4, 1)?,
                0xc1 => return Err(self.unexpected(WHAT)),
            }
            // Every value needs a byte, so a longer to-do list than bytes cannot be met.
            if self.remaining() < left {
                return Err(Malformed::Truncated {
                    expected: WHAT,
                    at: self.buf.len(),
                });
            }
        }
        Ok(())
    }

    fn skip_sized(&mut self, len_bytes: usize, more: usize) -> Read<()> {
        let len = self.wide_len(len_bytes, "a value")?;
        self.take(len + more, "a value").map(drop)
    }
}

fn sign_extend(value: u64, bits: u32) -> u64 {
    let shift = 64 - bits;
    ((value << shift).cast_signed() >> shift).cast_unsigned()
}
