//! The picker as the service uses it.
//!
//! Lives here: two trait implementations that only forward.
//! Never here: anything else.
//! Invariant: nothing is added or left out on the way.

use crate::extproc::exchange::{Follow, PickPods};
use crate::names::Endpoint;
use crate::pick::{Flight, Head, Picked, Picker, Refusal};
use crate::route::Plan;
use bytes::Bytes;

impl PickPods for Picker {
    type Flight = Flight;

    async fn pick(&self, head: Head, body: Option<Bytes>) -> Result<(Plan, Flight), Refusal> {
        Picker::pick(self, head, body)
            .await
            .map(|Picked { plan, flight }| (plan, flight))
    }
}

impl Follow for Flight {
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
