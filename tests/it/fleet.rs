//! The roster and the scraper, against a small HTTP server on loopback.
