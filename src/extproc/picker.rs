//! The picker as streams use it.
//!
//! Lives here: [`PickPods`] and [`Follow`] for the real thing.
//! Never here: anything else; a stand-in lives with the tests that need one.
//! Invariant: every call goes straight through.

use crate::extproc::exchange::{Follow, PickPods};
use crate::names::Endpoint;
use crate::pick::{Arrival, Ended, Flight, Head, Picked, Picker, Refusal};
use crate::route::Plan;
use bytes::Bytes;

impl PickPods for Picker {
    type Flight = Flight;

    async fn pick(&self, head: Head, body: Option<Bytes>) -> Result<(Plan, Flight), Refusal> {
        let Picked { plan, flight } = Picker::pick(self, head, body).await?;
        Ok((plan, flight))
    }

    fn ended_early(&self, arrival: &Arrival, how: Ended<'_>) {
        Picker::ended_early(self, arrival, how);
    }

    fn ready(&self) -> bool {
        Picker::ready(self)
    }
}

impl Follow for Flight {
    fn unsettled(&self) -> bool {
        Flight::unsettled(self)
    }

    fn settle(&mut self) {
        Flight::settle(self);
    }

    fn response_headers(&mut self, status: Option<u16>, served: Option<Endpoint>) {
        Flight::response_headers(self, status, served);
    }

    fn first_bytes(&mut self) {
        Flight::first_bytes(self);
    }

    fn response_bytes(&mut self, chunk: &[u8]) {
        Flight::response_bytes(self, chunk);
    }

    fn finish(self) {
        Flight::finish(self);
    }
}
