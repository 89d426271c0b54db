//! Random lives of a session against a model of the engine's side.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use proptest::prelude::*;
use tokio::runtime::Builder;

use super::*;
use crate::engine::frame;
use crate::engine::generation::{AbortSink, Generation};
use crate::engine::types::{Capability, EngineLimits, Sampling, Started, Stopping};

const VOCAB_SIZE: u32 = 100;
const MAX_TOKENS: u32 = 8;

fn facts() -> ModelFacts {
    ModelFacts {
        name: "model".to_owned(),
        architecture: String::new(),
        weight_format: String::new(),
        num_parameters: 1,
        vocab_size: VOCAB_SIZE,
        max_model_len: 64,
        bos_token_id: None,
        eos_token_ids: Vec::new(),
        default_sampling: Sampling::default(),
        runner: String::new(),
        engine_version: String::new(),
        limits: EngineLimits {
            max_submit_bytes: 1 << 20,
            max_num_seqs: 8,
            max_waiting: 8,
            max_samples: 8,
            max_top_logprobs: 5,
            max_stop_token_ids: 4,
            ..EngineLimits::default()
        },
        capabilities: [Capability::Logprobs].into_iter().collect(),
    }
}

#[derive(Debug, Clone)]
enum Action {
    Submit {
        samples: u32,
    },
    /// Drops the request at this position among those that live.
    Drop(prop::sample::Index),
    AbortSample(prop::sample::Index, prop::sample::Index),
    /// The transport takes one message.
    Write,
    /// The engine emits a token for one of its rows.
    Token(prop::sample::Index),
    /// The engine ends one of its rows.
    Finish(prop::sample::Index),
    /// The engine cancels what it was told to.
    Cancel,
}

fn action() -> impl Strategy<Value = Action> {
    use prop::sample::Index;
    prop_oneof![
        2 => (1u32..4).prop_map(|samples| Action::Submit { samples }),
        1 => any::<Index>().prop_map(Action::Drop),
        1 => any::<(Index, Index)>().prop_map(|(request, sample)| Action::AbortSample(request, sample)),
        4 => Just(Action::Write),
        3 => any::<Index>().prop_map(Action::Token),
        2 => any::<Index>().prop_map(Action::Finish),
        1 => Just(Action::Cancel),
    ]
}

struct Aborts {
    ledger: Arc<Mutex<Ledger>>,
    handles: Vec<u32>,
}

impl AbortSink for Aborts {
    fn abort(&self, sample: u32) {
        lock(&self.ledger).abort(self.handles[sample as usize]);
    }
}

fn lock(ledger: &Mutex<Ledger>) -> std::sync::MutexGuard<'_, Ledger> {
    ledger.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Live {
    generation: Generation,
    handles: Vec<u32>,
    let_go: BTreeSet<u32>,
}

impl Live {
    fn wants(&self, handle: u32) -> bool {
        self.handles.contains(&handle) && !self.let_go.contains(&handle)
    }
}

/// Both sides of a session.
struct World {
    ledger: Arc<Mutex<Ledger>>,
    live: Vec<Live>,
    /// Rows that the engine has, with the tokens that it has sent for each.
    engine: BTreeMap<u32, Vec<u32>>,
    aborted: BTreeSet<u32>,
    seen: BTreeSet<u32>,
    ended: BTreeMap<u32, Vec<u32>>,
    seq: u64,
}

impl World {
    fn new(next_handle: u32) -> Self {
        let ledger = Ledger { next_handle, ..Ledger::default() };
        Self {
            ledger: Arc::new(Mutex::new(ledger)),
            live: Vec::new(),
            engine: BTreeMap::new(),
            aborted: BTreeSet::new(),
            seen: BTreeSet::new(),
            ended: BTreeMap::new(),
            seq: 0,
        }
    }

    fn submit(&mut self, samples: u32) {
        let stopping = Stopping { max_tokens: Some(MAX_TOKENS), ..Stopping::default() };
        let request = GenerateRequest {
            prompt_ids: Arc::from([1, 2]),
            samples,
            stopping,
            ..GenerateRequest::default()
        };
        let message = convert::submit(&request, &facts()).unwrap();
        let ledger = Arc::clone(&self.ledger);
        let mut handles = Vec::new();
        let generation = lock(&self.ledger)
            .submit(&request, message, &facts(), |fresh| {
                handles.clone_from(&fresh);
                Generation::new(samples, None, Arc::new(Aborts { ledger, handles: fresh }))
            })
            .unwrap();
        self.live.push(Live { generation, handles, let_go: BTreeSet::new() });
    }

    /// What the engine does with a message, and what a message must satisfy.
    fn write(&mut self) {
        let Some(message) = lock(&self.ledger).next_message() else { return };
        match message.message.unwrap() {
            proto::session_request::Message::Submit(submit) => {
                let wanted =
                    submit.handles.iter().any(|handle| self.live.iter().any(|live| live.wants(*handle)));
                assert!(wanted, "a request that nobody waits for was written");
                for handle in submit.handles {
                    assert!(self.seen.insert(handle), "handle {handle} was used twice");
                    self.engine.insert(handle, Vec::new());
                }
            }
            proto::session_request::Message::Abort(abort) => {
                for chunk in abort.handles.as_chunks::<4>().0 {
                    let handle = u32::from_le_bytes(*chunk);
                    assert!(self.seen.contains(&handle), "the abort of {handle} came before its submission");
                    assert!(self.aborted.insert(handle), "handle {handle} was aborted twice");
                }
            }
            proto::session_request::Message::Drain(_) => unreachable!("never sent"),
        }
    }

    fn pick(&self, index: prop::sample::Index) -> Option<u32> {
        let rows: Vec<u32> = self.engine.keys().copied().collect();
        (!rows.is_empty()).then(|| *index.get(&rows))
    }

    fn send(&mut self, event: (u32, RowEvent)) {
        self.seq += 1;
        let frame = Frame { events: vec![event], faults: Vec::new() };
        let applied = lock(&self.ledger).apply(self.seq, frame);
        assert_eq!(applied.faults, 0);
    }

    fn token(&mut self, handle: u32) {
        let id = self.seq as u32 % VOCAB_SIZE;
        let sent = self.engine.get_mut(&handle).unwrap();
        if sent.len() < MAX_TOKENS as usize {
            sent.push(id);
            self.send((handle, RowEvent::Tokens { ids: vec![id], logprobs: Vec::new() }));
        }
    }

    fn finish(&mut self, handle: u32, finish: EngineFinish) {
        let tokens = self.engine.remove(&handle).unwrap();
        let completion_tokens = tokens.len() as u32;
        self.ended.insert(handle, tokens);
        self.send((handle, RowEvent::Finished { finish, completion_tokens }));
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Submit { samples } => self.submit(samples),
            Action::Drop(index) if !self.live.is_empty() => {
                let position = index.index(self.live.len());
                self.live.swap_remove(position);
            }
            Action::AbortSample(request, sample) if !self.live.is_empty() => {
                let position = request.index(self.live.len());
                let live = &mut self.live[position];
                let sample = sample.index(live.handles.len());
                live.generation.abort(sample as u32);
                live.let_go.insert(live.handles[sample]);
            }
            Action::Write => self.write(),
            Action::Token(index) => {
                if let Some(handle) = self.pick(index) {
                    self.token(handle);
                }
            }
            Action::Finish(index) => {
                if let Some(handle) = self.pick(index) {
                    self.finish(handle, EngineFinish::Length);
                }
            }
            Action::Cancel => {
                for handle in self.aborted.clone() {
                    if self.engine.contains_key(&handle) {
                        self.finish(handle, EngineFinish::Cancelled);
                    }
                }
            }
            Action::Drop(_) | Action::AbortSample(..) => {}
        }
    }

    /// Lets everything run out, then compares what each request read with what was sent.
    fn settle(mut self) {
        while !lock(&self.ledger).queue.is_empty() || !lock(&self.ledger).aborts.is_empty() {
            self.write();
        }
        for handle in self.engine.keys() {
            let is_wanted = self.live.iter().any(|live| live.wants(*handle));
            assert_eq!(
                self.aborted.contains(handle),
                !is_wanted,
                "of rows, those and only those unwanted are aborted"
            );
        }
        self.act(Action::Cancel);
        let rows: Vec<u32> = self.engine.keys().copied().collect();
        for handle in rows {
            self.finish(handle, EngineFinish::Length);
        }
        let runtime = Builder::new_current_thread().build().unwrap();
        for mut live in std::mem::take(&mut self.live) {
            let mut read: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
            let mut ends = BTreeSet::new();
            // Every sample has its end, so this cannot wait.
            while let Some(news) = runtime.block_on(live.generation.next()) {
                for (sample, delta) in news {
                    read.entry(sample).or_default().extend(delta.token_ids);
                    assert!(delta.finish.is_none() || ends.insert(sample), "two ends");
                }
            }
            for sample in ends {
                assert_eq!(read[&sample], self.ended[&live.handles[sample as usize]]);
            }
        }
        let ledger = lock(&self.ledger);
        assert!(ledger.rows.is_empty() && ledger.queue.is_empty() && ledger.aborts.is_empty());
        assert_eq!((ledger.num_open, ledger.queued_bytes), (0, 0));
    }
}

proptest! {
    #[test]
    fn every_request_gets_what_was_sent_for_it_and_one_end(
        // Near the wrap of handles too.
        next_handle in prop_oneof![Just(0), Just(u32::MAX - 3)],
        actions in prop::collection::vec(action(), 0..120),
    ) {
        let mut world = World::new(next_handle);
        for action in actions {
            world.act(action);
        }
        world.settle();
    }

    /// Any bytes at all in the columns: no panic, and only handles that they name are touched.
    #[test]
    fn no_step_hurts_requests_that_it_does_not_name(
        columns in prop::collection::vec(prop::collection::vec(0u8..8, 0..24), 8),
        started in prop::collection::vec((0u32..4, 0u32..3, 0u32..3), 0..3),
        ended in prop::collection::vec((0u32..4, 0i32..7, prop::option::of(0u32..200), 0u32..3), 0..3),
        with_logprobs: bool,
    ) {
        let mut columns = columns.into_iter().map(Bytes::from);
        let mut column = || columns.next().unwrap_or_default();
        let step = proto::Step {
            handles: column(),
            token_counts: column(),
            token_ids: column(),
            logprobs: with_logprobs.then(|| proto::LogprobColumns {
                handles: column(),
                chosen: column(),
                top_counts: column(),
                top_ids: column(),
                top_logprobs: column(),
            }),
            started: started
                .into_iter()
                .map(|(handle, prompt_tokens, cached_tokens)| proto::Started {
                    handle, prompt_tokens, cached_tokens, ..proto::Started::default()
                })
                .collect(),
            finished: ended
                .into_iter()
                .map(|(handle, reason, stop_token_id, completion_tokens)| proto::Finished {
                    handle, reason, stop_token_id, completion_tokens, ..proto::Finished::default()
                })
                .collect(),
            ..proto::Step::default()
        };
        let mut world = World::new(0);
        world.submit(3);
        world.write();
        // A handle that no small number in the columns above can spell.
        lock(&world.ledger).next_handle = 0x4040_4040;
        world.submit(1);
        world.write();
        lock(&world.ledger).apply(1, frame::decode(&step, VOCAB_SIZE));
        prop_assert!(matches!(lock(&world.ledger).rows.get(&0x4040_4040), Some(Row::Open(open)) if open.received == 0));
        world.seq = 1;
        world.token(0x4040_4040);
        let Some(Row::Open(open)) = lock(&world.ledger).rows.remove(&0x4040_4040) else { panic!("it is open") };
        prop_assert_eq!(open.received, 1);
    }
}

#[test]
fn a_start_follows_no_token() {
    let mut world = World::new(0);
    world.submit(1);
    world.write();
    world.token(0);
    let started = Started {
        prompt_tokens: 2,
        cached_tokens: 0,
        queue: std::time::Duration::ZERO,
        prefill: std::time::Duration::ZERO,
    };
    let frame = Frame { events: vec![(0, RowEvent::Started(started))], faults: Vec::new() };
    let applied = lock(&world.ledger).apply(9, frame);
    assert_eq!(applied.faults, 1);
}
