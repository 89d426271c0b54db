//! Stop strings: an incremental Aho-Corasick automaton that also tells how much of the text so
//! far could still be the beginning of one. It works on the bytes of visible text.
//!
//! Which match counts: generation ends at the first byte that completes any stop string, and the
//! text is cut before the longest stop string that ends there. That is the leftmost match in the
//! shortest text that holds one, so it depends neither on how the text was chopped into pieces
//! nor on the order of the list.

use std::collections::VecDeque;

const ROOT: u32 = 0;

#[derive(Debug, Clone, Default)]
struct Node {
    /// Sorted by byte.
    children: Vec<(u8, u32)>,
    /// The longest proper suffix of this node's string that is also a node.
    fail: u32,
    /// Bytes from the root: what must be held back in this state.
    depth: u32,
    /// Length of the longest stop string that ends here; 0: none.
    matched: u32,
}

/// The compiled stop strings of one request, shared by its samples.
#[derive(Debug, Clone)]
pub struct StopSet {
    nodes: Vec<Node>,
    /// The root's children in full: most bytes of a text are looked up here.
    root: Box<[u32; 256]>,
}

/// One sample's place in the automaton.
#[derive(Debug, Clone, Copy, Default)]
pub struct StopMatcher {
    node: u32,
}

/// A stop string was completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StopMatch {
    /// Where the match ends, counted from the start of the bytes that were fed.
    pub end: usize,
    /// Length of the match; it may begin in bytes that were fed earlier.
    pub len: usize,
}

impl StopSet {
    /// Compiles the strings; empty ones are the caller's to refuse and match nothing here.
    pub fn new<S: AsRef<str>>(stops: &[S]) -> Self {
        let mut set = Self { nodes: vec![Node::default()], root: Box::new([ROOT; 256]) };
        for stop in stops {
            set.insert(stop.as_ref().as_bytes());
        }
        for &(byte, child) in &set.nodes[ROOT as usize].children {
            set.root[usize::from(byte)] = child;
        }
        set.link();
        set
    }

    /// Whether nothing can match.
    pub fn is_empty(&self) -> bool {
        self.nodes.len() == 1
    }

    fn insert(&mut self, stop: &[u8]) {
        let mut node = ROOT;
        for &byte in stop {
            let at = node as usize;
            node = match self.nodes[at].children.binary_search_by_key(&byte, |&(edge, _)| edge) {
                Ok(index) => self.nodes[at].children[index].1,
                Err(index) => {
                    let child = self.nodes.len() as u32;
                    let depth = self.nodes[at].depth + 1;
                    self.nodes[at].children.insert(index, (byte, child));
                    self.nodes.push(Node { depth, ..Node::default() });
                    child
                }
            };
        }
        self.nodes[node as usize].matched = stop.len() as u32;
    }

    /// Sets the fail links breadth first, so that a node's shorter suffixes are ready before it.
    fn link(&mut self) {
        let mut queue: VecDeque<u32> =
            self.nodes[ROOT as usize].children.iter().map(|&(_, child)| child).collect();
        while let Some(node) = queue.pop_front() {
            let fail = self.nodes[node as usize].fail;
            if self.nodes[node as usize].matched == 0 {
                self.nodes[node as usize].matched = self.nodes[fail as usize].matched;
            }
            for (byte, child) in self.nodes[node as usize].children.clone() {
                self.nodes[child as usize].fail = self.step(fail, byte);
                queue.push_back(child);
            }
        }
    }

    /// The state after `byte`. Each fail link shortens the held text, so the cost is O(1)
    /// amortised over a text.
    fn step(&self, mut node: u32, byte: u8) -> u32 {
        while node != ROOT {
            let current = &self.nodes[node as usize];
            if let Ok(index) = current.children.binary_search_by_key(&byte, |&(edge, _)| edge) {
                return current.children[index].1;
            }
            node = current.fail;
        }
        self.root[usize::from(byte)]
    }
}

impl StopMatcher {
    /// Reads more text; stops at the first byte that completes a stop string.
    pub fn feed(&mut self, set: &StopSet, bytes: &[u8]) -> Option<StopMatch> {
        for (index, &byte) in bytes.iter().enumerate() {
            self.node = set.step(self.node, byte);
            let matched = set.nodes[self.node as usize].matched;
            if matched > 0 {
                return Some(StopMatch { end: index + 1, len: matched as usize });
            }
        }
        None
    }

    /// How many bytes at the end of the text could still become a stop string.
    pub fn held(self, set: &StopSet) -> usize {
        set.nodes[self.node as usize].depth as usize
    }
}
