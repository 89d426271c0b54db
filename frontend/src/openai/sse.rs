//! Server-sent events: framing, comments through silence, the error event, `[DONE]`.
//!
//! The body builds its next event only when the connection asks for one, so what a slow reader
//! has not taken merges into larger deltas. A failure after the first byte is one
//! `data: {"error": …}` event; no finish reason and no `[DONE]` follow it.

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream::{self, StreamExt};
use http::header;
use serde::Serialize;
use tokio::time::{Instant, Sleep};

use super::answer::{Answer, ChoiceEvent};
use super::endpoint::Endpoint;
use super::prepare::Prepared;
use super::usage::UsageCount;
use crate::error::ApiError;

/// Bytes of one or more events.
#[derive(Debug, Default)]
pub(super) struct Frame {
    bytes: Vec<u8>,
}

impl Frame {
    /// Adds `data: JSON` and the blank line.
    pub(super) fn json<T: Serialize>(&mut self, value: &T) {
        self.bytes.extend_from_slice(b"data: ");
        // Writing our own structs to memory cannot fail.
        let _ = serde_json::to_writer(&mut self.bytes, value);
        self.bytes.extend_from_slice(b"\n\n");
    }

    fn text(&mut self, text: &str) {
        self.bytes.extend_from_slice(b"data: ");
        self.bytes.extend_from_slice(text.as_bytes());
        self.bytes.extend_from_slice(b"\n\n");
    }
}

/// Answers with a stream. Waits for the first events before it commits to a status, so that a
/// request which the engine refuses gets a plain HTTP error; but not longer than a client may be
/// left without a sign of life.
pub(super) async fn respond<E: Endpoint>(
    mut answer: Answer,
    endpoint: E,
    prepared: &Prepared,
    keepalive: Duration,
) -> Result<Response, ApiError> {
    let first = match tokio::time::timeout(keepalive, answer.next()).await {
        Ok(Some(events)) => Some(events?),
        Ok(None) | Err(_) => None,
    };
    let state = EventStream {
        answer,
        endpoint,
        usage: UsageCount::new(prepared),
        include_usage: prepared.options.delivery.includes_usage(),
        first,
        ended: false,
        keepalive,
        last_frame: Instant::now(),
        alarm: Box::pin(tokio::time::sleep(keepalive)),
    };
    let frames = stream::unfold(state, |mut state| async { Some((state.next_frame().await?, state)) });
    let frames = AssertUnwindSafe(frames)
        .catch_unwind()
        .map(|frame| Ok::<_, Infallible>(frame.unwrap_or_else(|_| panicked())));
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-cache"),
        // Asks nginx to pass events on as they come.
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    Ok((headers, Body::from_stream(frames)).into_response())
}

fn panicked() -> Bytes {
    let mut frame = Frame::default();
    frame.text(&ApiError::Internal("The server failed while it wrote the answer.".to_owned()).body());
    frame.bytes.into()
}

struct EventStream<E> {
    answer: Answer,
    endpoint: E,
    usage: UsageCount,
    include_usage: bool,
    /// Events that were read before the response began.
    first: Option<Vec<ChoiceEvent>>,
    ended: bool,
    keepalive: Duration,
    last_frame: Instant,
    /// One timer for the whole stream: it is moved when it rings, not at every event.
    alarm: Pin<Box<Sleep>>,
}

impl<E: Endpoint> EventStream<E> {
    async fn next_frame(&mut self) -> Option<Bytes> {
        let mut frame = Frame::default();
        while frame.bytes.is_empty() {
            if self.ended {
                return None;
            }
            if let Some(events) = self.first.take() {
                self.write(&events, &mut frame);
                continue;
            }
            let events = tokio::select! {
                biased;
                events = self.answer.next() => events,
                () = &mut self.alarm => {
                    let due = self.last_frame + self.keepalive;
                    if Instant::now() >= due {
                        frame.bytes.extend_from_slice(b": keep-alive\n\n");
                        self.last_frame = Instant::now();
                    }
                    self.alarm.as_mut().reset(self.last_frame + self.keepalive);
                    continue;
                }
            };
            match events {
                Some(Ok(events)) => self.write(&events, &mut frame),
                Some(Err(error)) => {
                    frame.text(&error.body());
                    self.ended = true;
                }
                None => {
                    if self.include_usage {
                        self.endpoint.write_usage(&self.usage.total(), &mut frame);
                    }
                    frame.text("[DONE]");
                    self.ended = true;
                }
            }
        }
        self.last_frame = Instant::now();
        Some(frame.bytes.into())
    }

    fn write(&mut self, events: &[ChoiceEvent], frame: &mut Frame) {
        for event in events {
            self.usage.read(event);
            self.endpoint.write_event(event, frame);
        }
    }
}
