//! A connection whose client goes on reading.
//!
//! Lives here: [`Attentive`], a socket that gives up on a client that does not.
//! Never here: what is written.
//! Invariant: no write waits longer than [`STALL`] for the client to take anything, so that those who ask
//! and never read cannot keep the port's connections from probes.

use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Sleep;

/// Longest time in which a client may take nothing of what waits for it.
const STALL: Duration = Duration::from_secs(5);

/// See the module.
#[derive(Debug)]
pub(super) struct Attentive {
    stream: TcpStream,
    /// When the client has taken nothing for too long, while something waits for it.
    over: Option<Pin<Box<Sleep>>>,
}

impl Attentive {
    pub(super) fn new(stream: TcpStream) -> Attentive {
        Attentive { stream, over: None }
    }

    /// `written`, unless nothing could be written for too long.
    fn within_time(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<Result<usize>>,
    ) -> Poll<Result<usize>> {
        if written.is_ready() {
            self.over = None;
            return written;
        }
        let over = || Box::pin(tokio::time::sleep(STALL));
        ready!(self.over.get_or_insert_with(over).as_mut().poll(context));
        Poll::Ready(Err(Error::from(ErrorKind::TimedOut)))
    }
}

impl AsyncRead for Attentive {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl AsyncWrite for Attentive {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.within_time(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.within_time(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
