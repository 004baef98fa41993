//! The decision page in a real Chromium, at full load.

use crate::fleet::{Fleet, Pods};
use crate::scenario::scenario;

#[tokio::test(flavor = "multi_thread")]
async fn the_page_stays_responsive_at_500_decisions_a_second_and_1000_pods() {
    let fleet = Fleet::start(Pods::Thousand, "").await;
    fleet.traffic(500);
    scenario("load", &[("PAGE", fleet.url()), ("LEAST_RATE", "480")]).await;
}
