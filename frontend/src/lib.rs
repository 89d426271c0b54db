//! The Rung frontend: everything that is text and sockets. Layers, each using only those below:
//!
//! ```text
//! router → openai → chat → text
//!               ↘ engine (the only protobuf)
//! ```

pub mod admission;
pub mod chat;
pub mod config;
pub mod engine;
pub mod error;
pub mod grammar;
pub mod keys;
pub mod lifecycle;
pub mod listener;
pub mod metrics;
pub mod middleware;
pub mod model;
pub mod openai;
pub mod queue;
pub mod router;
pub mod serve;
pub mod state;
pub mod text;
