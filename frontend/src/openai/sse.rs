//! Server-sent events: framing, comments through silence, the error event, `[DONE]`.
//!
//! The body builds its next event only when the connection asks for one, so what a slow reader
//! has not taken merges into larger deltas. A failure after the first byte is one
//! `data: {"error": …}` event; no finish reason and no `[DONE]` follow it.

use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::header;
use serde::Serialize;
use tokio::time::{Instant, Sleep};

use super::answer::{Answer, ChoiceEvent};
use super::endpoint::Endpoint;
use super::prepare::Prepared;
use super::usage::UsageCount;
use crate::error::ApiError;

/// Room for the events of one token without logprobs.
const USUAL_FRAME_BYTES: usize = 384;

/// Bytes of one or more events.
#[derive(Debug, Default)]
pub(super) struct Frame {
    bytes: Vec<u8>,
}

impl Frame {
    /// Adds `data: JSON` and the blank line.
    pub(super) fn json<T: Serialize>(&mut self, value: &T) {
        if self.bytes.is_empty() {
            self.bytes.reserve(USUAL_FRAME_BYTES);
        }
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
pub(super) async fn respond<E: Endpoint + Unpin>(
    mut answer: Answer,
    endpoint: E,
    prepared: &Prepared,
    keepalive: Duration,
) -> Result<Response, ApiError> {
    let first = match tokio::time::timeout(keepalive, answer.next()).await {
        Ok(Some(events)) => Some(events?),
        Ok(None) | Err(_) => None,
    };
    let body = EventStream {
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
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-cache"),
        // Asks nginx to pass events on as they come.
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    Ok((headers, Body::new(body)).into_response())
}

/// The body: polled by the connection, without a task or a queue of its own.
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

impl<E: Endpoint + Unpin> http_body::Body for EventStream<E> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Infallible>>> {
        let stream = self.get_mut();
        let frame = catch_unwind(AssertUnwindSafe(|| stream.poll_events(context))).unwrap_or_else(|_| {
            stream.ended = true;
            let mut frame = Frame::default();
            frame.text(&ApiError::Internal("The server failed while it wrote the answer.".to_owned()).body());
            Poll::Ready(Some(frame))
        });
        frame.map(|frame| frame.map(|frame| Ok(http_body::Frame::data(frame.bytes.into()))))
    }
}

impl<E: Endpoint> EventStream<E> {
    fn poll_events(&mut self, context: &mut Context<'_>) -> Poll<Option<Frame>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let mut frame = Frame::default();
        if let Some(events) = self.first.take() {
            self.write(&events, &mut frame);
        }
        while frame.bytes.is_empty() {
            match self.answer.poll_next(context) {
                Poll::Ready(Some(Ok(events))) => self.write(&events, &mut frame),
                Poll::Ready(Some(Err(error))) => {
                    frame.text(&error.body());
                    self.ended = true;
                }
                Poll::Ready(None) => {
                    if self.include_usage {
                        self.endpoint.write_usage(&self.usage.total(), &mut frame);
                    }
                    frame.text("[DONE]");
                    self.ended = true;
                }
                Poll::Pending => {
                    ready!(self.alarm.as_mut().poll(context));
                    let due = self.last_frame + self.keepalive;
                    if Instant::now() >= due {
                        frame.bytes.extend_from_slice(b": keep-alive\n\n");
                        self.last_frame = Instant::now();
                    }
                    self.alarm.as_mut().reset(self.last_frame + self.keepalive);
                }
            }
        }
        self.last_frame = Instant::now();
        Poll::Ready(Some(frame))
    }

    fn write(&mut self, events: &[ChoiceEvent], frame: &mut Frame) {
        for event in events {
            self.usage.read(event);
            self.endpoint.write_event(event, frame);
        }
    }
}
