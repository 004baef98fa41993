//! The client side of ZMTP 3.0 (<https://rfc.zeromq.org/spec/23/>), NULL mechanism, over TCP.
//!
//! Lives here: [`Connection`], as a SUB or a DEALER socket with exactly one peer. The ZeroMQ
//! libraries hide reconnects, which are what betrays an engine's restart, and have no limit on the
//! frames they accept; hence these few lines of our own.
//! Never here: what the messages mean.
//! Invariant: memory follows the bytes that really arrived, up to a fixed bound, whatever lengths
//! the peer announces; a frame that is too long is read past, not kept.

use crate::kv::event::MAX_PAYLOAD;
use std::io;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

/// Most frames in a message; more is a protocol error.
const MAX_FRAMES: usize = 8;
/// Longest frame that is read past, in bytes; longer is a protocol error.
const MAX_SKIPPED: u64 = 1 << 30;
/// Longest command, in bytes; longer is a protocol error.
const MAX_COMMAND: u64 = 4096;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// What this end is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Listens to a PUB socket.
    Sub,
    /// Talks to a ROUTER socket.
    Dealer,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Sub => "SUB",
            Kind::Dealer => "DEALER",
        }
    }

    fn accepts(self, peer: &[u8]) -> bool {
        match self {
            Kind::Sub => peer == b"PUB" || peer == b"XPUB",
            Kind::Dealer => [&b"ROUTER"[..], b"DEALER", b"REP"].contains(&peer),
        }
    }
}

/// Why there is no (longer a) connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// The address is not one that can be dialled.
    #[error("address: expected tcp://host:port, found {0}")]
    Address(String),
    /// TCP failed, or the peer closed.
    #[error("connection: {0}")]
    Io(#[from] io::Error),
    /// The peer speaks something else.
    #[error("peer: expected {expected}, found {found}")]
    Protocol {
        /// What should have come.
        expected: &'static str,
        /// What came.
        found: String,
    },
}

fn protocol(expected: &'static str, found: impl ToString) -> Error {
    Error::Protocol {
        expected,
        found: found.to_string(),
    }
}

/// One message.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Message {
    /// Its frames; one that was too long is empty.
    pub(super) frames: Vec<Vec<u8>>,
    /// Whether one was.
    pub(super) too_long: bool,
}

/// One TCP connection after the handshake. When it breaks, so does this; nothing reconnects.
pub(super) struct Connection {
    reader: BufReader<OwnedReadHalf>,
    writer: OwnedWriteHalf,
    /// Whether the peer knows PING (ZMTP 3.1).
    answers_pings: bool,
}

struct FrameHead {
    more: bool,
    command: bool,
    len: u64,
}

impl Connection {
    /// Dials `address` (`tcp://host:port`) and shakes hands. Never returns by itself when the peer
    /// keeps silent: the caller sets the time limit.
    pub(super) async fn open(address: &str, kind: Kind) -> Result<Connection, Error> {
        let target = address
            .strip_prefix("tcp://")
            .ok_or_else(|| Error::Address(address.to_owned()))?;
        let stream = TcpStream::connect(target).await?;
        stream.set_nodelay(true)?;
        let (reader, writer) = stream.into_split();
        let mut connection = Connection {
            reader: BufReader::with_capacity(64 * 1024, reader),
            writer,
            answers_pings: false,
        };
        connection.greet().await?;
        connection.ready(kind).await?;
        Ok(connection)
    }

    async fn greet(&mut self) -> Result<(), Error> {
        let mut ours = [0u8; 64];
        ours[0] = 0xff;
        ours[9] = 0x7f;
        ours[10] = 3;
        ours[12..16].copy_from_slice(b"NULL");
        self.writer.write_all(&ours).await?;
        let mut theirs = [0u8; 64];
        self.reader.read_exact(&mut theirs).await?;
        if theirs[0] != 0xff || theirs[9] & 1 != 1 || theirs[10] < 3 {
            return Err(protocol("ZMTP 3", "another protocol"));
        }
        if theirs[12..32] != ours[12..32] {
            return Err(protocol("the NULL mechanism", "another mechanism"));
        }
        self.answers_pings = 3 < theirs[10] || 1 <= theirs[11];
        Ok(())
    }

    async fn ready(&mut self, kind: Kind) -> Result<(), Error> {
        let name = kind.name().as_bytes();
        let mut body = b"\x05READY\x0bSocket-Type\0\0\0".to_vec();
        body.push(u8::try_from(name.len()).unwrap_or(0));
        body.extend_from_slice(name);
        self.write_frame(COMMAND, &body).await?;
        let head = self.frame_head().await?;
        if !head.command {
            return Err(protocol("a READY command", "a message"));
        }
        let body = self.command(head.len).await?;
        let Some(properties) = body.strip_prefix(b"\x05READY") else {
            return Err(protocol("a READY command", "another command"));
        };
        let peer = socket_type(properties).unwrap_or_default();
        if kind.accepts(peer) {
            Ok(())
        } else {
            let found = String::from_utf8_lossy(peer).into_owned();
            Err(protocol("a socket to match", found))
        }
    }

    /// Asks for the messages whose first frame starts with `topic`.
    pub(super) async fn subscribe(&mut self, topic: &str) -> Result<(), Error> {
        let mut body = vec![1];
        body.extend_from_slice(topic.as_bytes());
        self.write_frame(0, &body).await
    }

    /// Sends one message.
    pub(super) async fn send(&mut self, frames: &[&[u8]]) -> Result<(), Error> {
        for (at, frame) in frames.iter().enumerate() {
            let more = if at + 1 < frames.len() { MORE } else { 0 };
            self.write_frame(more, frame).await?;
        }
        Ok(())
    }

    /// Waits until bytes are there. Unlike [`Connection::receive`] it can be given up at any time.
    pub(super) async fn readable(&mut self) -> Result<(), Error> {
        if self.reader.fill_buf().await?.is_empty() {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        Ok(())
    }

    /// The next message, or `None` after a command, which is dealt with here. Once given up
    /// half-way, the connection is of no further use.
    pub(super) async fn receive(&mut self) -> Result<Option<Message>, Error> {
        let mut message = Message::default();
        let mut kept = 0;
        loop {
            let head = self.frame_head().await?;
            if head.command {
                let body = self.command(head.len).await?;
                self.answer(&body).await?;
                if message.frames.is_empty() {
                    return Ok(None);
                }
                continue;
            }
            if MAX_FRAMES <= message.frames.len() {
                return Err(protocol("at most 8 frames", "more"));
            }
            let room = (MAX_PAYLOAD + 4096) as u64 - kept;
            if room < head.len {
                self.read_past(head.len).await?;
                message.frames.push(Vec::new());
                message.too_long = true;
            } else {
                message.frames.push(self.body(head.len).await?);
                kept += head.len;
            }
            if !head.more {
                return Ok(Some(message));
            }
        }
    }

    /// Makes a living peer say something; `false` if it would not understand, and nothing was sent.
    pub(super) async fn ping(&mut self) -> Result<bool, Error> {
        if self.answers_pings {
            // The two bytes allow the peer to hang up if it hears nothing for that long; zero: no.
            self.write_frame(COMMAND, b"\x04PING\0\0").await?;
        }
        Ok(self.answers_pings)
    }

    /// A PING wants its context back; nothing else wants an answer.
    async fn answer(&mut self, command: &[u8]) -> Result<(), Error> {
        let Some(ping) = command.strip_prefix(b"\x04PING") else {
            return Ok(());
        };
        let mut body = b"\x04PONG".to_vec();
        body.extend_from_slice(ping.get(2..).unwrap_or_default());
        self.write_frame(COMMAND, &body).await
    }

    async fn frame_head(&mut self) -> Result<FrameHead, Error> {
        let flags = self.reader.read_u8().await?;
        if flags & !(MORE | LONG | COMMAND) != 0 {
            return Err(protocol("a frame", format!("flags {flags:#04x}")));
        }
        let len = if flags & LONG == 0 {
            u64::from(self.reader.read_u8().await?)
        } else {
            self.reader.read_u64().await?
        };
        Ok(FrameHead {
            more: flags & MORE != 0,
            command: flags & COMMAND != 0,
            len,
        })
    }

    async fn command(&mut self, len: u64) -> Result<Vec<u8>, Error> {
        if MAX_COMMAND < len {
            return Err(protocol("a short command", format!("{len} bytes")));
        }
        self.body(len).await
    }

    /// Grows with what arrives, not with what was announced.
    async fn body(&mut self, len: u64) -> Result<Vec<u8>, Error> {
        let mut body = Vec::new();
        let read = (&mut self.reader).take(len).read_to_end(&mut body).await?;
        if read as u64 == len {
            Ok(body)
        } else {
            Err(io::Error::from(io::ErrorKind::UnexpectedEof).into())
        }
    }

    async fn read_past(&mut self, len: u64) -> Result<(), Error> {
        if MAX_SKIPPED < len {
            return Err(protocol("a frame", format!("{len} bytes")));
        }
        let mut left = usize::try_from(len).unwrap_or(usize::MAX);
        while 0 < left {
            let there = self.reader.fill_buf().await?.len().min(left);
            if there == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
            self.reader.consume(there);
            left -= there;
        }
        Ok(())
    }

    async fn write_frame(&mut self, flags: u8, body: &[u8]) -> Result<(), Error> {
        let mut bytes = Vec::with_capacity(9 + body.len());
        match u8::try_from(body.len()) {
            Ok(short) => bytes.extend_from_slice(&[flags, short]),
            Err(_) => {
                bytes.push(flags | LONG);
                bytes.extend_from_slice(&(body.len() as u64).to_be_bytes());
            }
        }
        bytes.extend_from_slice(body);
        self.writer.write_all(&bytes).await?;
        Ok(())
    }
}

/// The value of `Socket-Type` among the properties of a READY command.
fn socket_type(mut properties: &[u8]) -> Option<&[u8]> {
    loop {
        let (len, rest) = properties.split_first()?;
        let (name, rest) = rest.split_at_checked(usize::from(*len))?;
        let (len, rest) = rest.split_first_chunk::<4>()?;
        let len = usize::try_from(u32::from_be_bytes(*len)).ok()?;
        let (value, rest) = rest.split_at_checked(len)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Some(value);
        }
        properties = rest;
    }
}

#[cfg(test)]
pub(super) mod tests;
