//! The engine side of the frontend against engines that tests script: sessions and the pool, the
//! supervisor, and the whole server process. One crate, so that it is linked once.

#![expect(clippy::unwrap_used, reason = "tests")]

mod abuse;
mod child;
mod client;
mod mock_engine;
#[expect(dead_code, reason = "the benchmark uses the rest")]
mod player;
mod pool;
mod process;
mod rules;
mod supervisor;
