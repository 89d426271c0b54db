//! Stop strings, and text, ids and logprobs kept in step around them.

#![expect(clippy::unwrap_used, reason = "tests")]

mod support;

use std::sync::Arc;

use proptest::prelude::*;
use rung_frontend::text::{LeadingSpace, SampleRules, SampleText, StopMatcher, StopSet, TextDelta};
use support::{IM_END, byte_id, byte_level, bytes_as_ids, logprobs_for};

fn rules(stops: &[&str], min_tokens: u32) -> Arc<SampleRules> {
    Arc::new(plain_rules(stops, min_tokens))
}

fn including_rules(stops: &[&str]) -> Arc<SampleRules> {
    Arc::new(SampleRules { include_stop: true, ..plain_rules(stops, 0) })
}

fn plain_rules(stops: &[&str], min_tokens: u32) -> SampleRules {
    SampleRules {
        tokenizer: byte_level(),
        stops: StopSet::new(stops),
        include_stop: false,
        ending_ids: vec![IM_END],
        min_tokens,
        leading: LeadingSpace::Keep,
        logprobs: true,
    }
}

/// Reads tokens in pieces of these sizes and appends what comes out, as both modes do.
fn read(rules: &Arc<SampleRules>, ids: &[u32], sizes: &[usize]) -> TextDelta {
    let logprobs = logprobs_for(ids, 2);
    let mut sample = SampleText::new(Arc::clone(rules));
    let mut whole = TextDelta::default();
    let mut at = 0;
    let mut sizes = sizes.iter().copied().cycle();
    while at < ids.len() && !whole.stopped {
        let end = (at + sizes.next().unwrap().max(1)).min(ids.len());
        let delta = sample.push(&ids[at..end], logprobs[at..end].to_vec());
        assert_eq!(delta.token_ids.len(), delta.entries.len());
        whole.append(delta);
        at = end;
    }
    whole.append(sample.finish());
    whole
}

fn text_of(stops: &[&str], text: &str) -> (String, bool) {
    let delta = read(&rules(stops, 0), &bytes_as_ids(text.as_bytes()), &[1]);
    (delta.text, delta.stopped)
}

/// By definition: the first byte that completes a stop, then the longest stop ending there; where
/// that begins and ends.
fn naive_match(text: &str, stops: &[&str]) -> Option<(usize, usize)> {
    (1..=text.len()).find_map(|end| {
        let longest = stops
            .iter()
            .filter(|stop| text.as_bytes()[..end].ends_with(stop.as_bytes()))
            .map(|stop| stop.len());
        longest.max().map(|len| (end - len, end))
    })
}

fn naive_cut(text: &str, stops: &[&str]) -> Option<usize> {
    naive_match(text, stops).map(|(begin, _)| begin)
}

/// The visible text, and for each token the byte of it where the character of the token's first
/// byte begins. Written over whole strings, unlike what it checks.
fn naive_text(tokens: &[Vec<u8>]) -> (String, Vec<usize>) {
    let bytes = tokens.concat();
    // For each raw byte, where its character begins in the text.
    let mut text = String::new();
    let mut begins = Vec::new();
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            begins.extend(std::iter::repeat_n(text.len(), character.len_utf8()));
            text.push(character);
        }
        if !chunk.invalid().is_empty() {
            begins.extend(std::iter::repeat_n(text.len(), chunk.invalid().len()));
            text.push('\u{FFFD}');
        }
    }
    let mut raw = 0;
    let starts = tokens
        .iter()
        .map(|token| {
            // A token without bytes stands where the text had got to: before a character that
            // is unfinished.
            let place = if token.is_empty() && ends_unfinished(&bytes[..raw]) { raw - 1 } else { raw };
            let start = begins.get(place).copied().unwrap_or(text.len());
            raw += token.len();
            start
        })
        .collect();
    (text, starts)
}

/// Whether more bytes could make a character of the end.
fn ends_unfinished(bytes: &[u8]) -> bool {
    let last = bytes.utf8_chunks().last().map_or(&[][..], |chunk| chunk.invalid());
    std::str::from_utf8(last).is_err_and(|error| error.error_len().is_none())
}

fn alphabet() -> impl Strategy<Value = Vec<u32>> {
    let mut ids = bytes_as_ids(b"aaabbb\xE2\x82\xAC\xF0\x9F\x8C\x8A\xFF");
    ids.push(1); // a control token
    ids.extend(byte_level().encode("<think> the", rung_frontend::text::SpecialTokens::Omit).unwrap());
    prop::collection::vec(prop::sample::select(ids), 0..24)
}

fn stop_lists() -> impl Strategy<Value = Vec<String>> {
    prop::collection::vec("[ab€🌊\u{FFFD}t]{1,4}", 0..4)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn the_matcher_agrees_with_the_definition(
        text in "[abc]{0,30}",
        stops in prop::collection::vec("[abc]{1,5}", 1..5),
    ) {
        let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
        let set = StopSet::new(&stops);
        let mut matcher = StopMatcher::default();
        let mut found = None;
        for (index, byte) in text.bytes().enumerate() {
            if let Some(hit) = matcher.feed(&set, &[byte]) {
                found = Some(index + 1 - hit.len);
                break;
            }
            // Held back: exactly the longest end of the text that begins a stop.
            let so_far = &text[..=index];
            let live = (0..=so_far.len()).find(|&at| stops.iter().any(|stop| stop.starts_with(&so_far[at..])));
            prop_assert_eq!(so_far.len() - live.unwrap(), matcher.held(&set));
        }
        prop_assert_eq!(found, naive_cut(&text, &stops));
    }

    #[test]
    fn text_ids_and_logprobs_agree_with_the_definition(
        ids in alphabet(),
        stops in stop_lists(),
        includes in any::<bool>(),
        sizes in prop::collection::vec(1usize..6, 1..6),
    ) {
        let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
        let rules = if includes { including_rules(&stops) } else { rules(&stops, 0) };
        let delta = read(&rules, &ids, &sizes);

        let tokenizer = byte_level();
        let vocabulary = tokenizer.vocabulary();
        let tokens: Vec<Vec<u8>> = ids
            .iter()
            .map(|&id| if vocabulary.is_special(id) { Vec::new() } else { vocabulary.bytes(id).to_vec() })
            .collect();
        let (text, starts) = naive_text(&tokens);
        let cut = naive_match(&text, &stops).map(|(begin, end)| if includes { end } else { begin });
        let visible = &text[..cut.unwrap_or(text.len())];
        prop_assert_eq!(&delta.text, visible);
        prop_assert_eq!(delta.stopped, cut.is_some());
        if !includes {
            prop_assert!(stops.iter().all(|stop| !delta.text.contains(stop)), "a stop string leaked");
        }

        let kept = match cut {
            None => ids.len(),
            Some(cut) => tokens
                .iter()
                .zip(&starts)
                .take_while(|(token, start)| **start < cut || (token.is_empty() && **start == cut && !includes))
                .count(),
        };
        prop_assert_eq!(&delta.token_ids, &ids[..kept]);
        let logprobs = logprobs_for(&ids, 2);
        for (index, entry) in delta.entries.iter().enumerate() {
            prop_assert_eq!(entry.id, ids[index]);
            prop_assert_eq!(entry.logprobs.as_ref(), Some(&logprobs[index]));
            if !tokens[index].is_empty() {
                prop_assert_eq!(entry.char_offset, text[..starts[index]].chars().count());
            }
        }
    }

    #[test]
    fn any_cut_gives_the_same_with_min_tokens_and_ending_ids(
        mut ids in alphabet(),
        stops in stop_lists(),
        min_tokens in 0u32..12,
        ends in any::<bool>(),
        sizes in prop::collection::vec(1usize..6, 1..6),
    ) {
        if ends {
            ids.push(IM_END);
        }
        let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
        let rules = rules(&stops, min_tokens);
        prop_assert_eq!(read(&rules, &ids, &sizes), read(&rules, &ids, &[ids.len().max(1)]));
    }

    #[test]
    fn any_ids_of_any_value_are_read(ids in prop::collection::vec(any::<u32>(), 0..40)) {
        read(&rules(&["a", "\u{FFFD}b"], 1), &ids, &[3]);
    }
}

#[test]
fn b62_text_ends_before_the_leftmost_match() {
    let cases: [(&[&str], &str, &str); 9] = [
        (&["b"], "aabbbbaab", "aa"),
        (&["bb", "b"], "aabbbbaab", "aa"),
        (&["bb"], "aabbbbaab", "aa"),
        (&["ab", "b"], "aabbbbaab", "a"),
        (&["b", "ab"], "aabbbbaab", "a"),
        (&["aabbbbaab"], "aabbbbaab", ""),
        // Ends first, though another stop began before it.
        (&["abcd", "bc"], "xabcdx", "xa"),
        // A live prefix that comes to nothing, then a match inside it.
        (&["aab"], "aaaab", "aa"),
        (&["nope"], "nop", "nop"),
    ];
    for (stops, text, expected) in cases {
        assert_eq!(text_of(stops, text).0, expected, "{stops:?} in {text:?}");
    }
}

#[test]
fn b62_an_included_stop_ends_the_text_and_nothing_waits_for_it() {
    let rules = including_rules(&["STOP", "bb"]);
    let mut sample = SampleText::new(Arc::clone(&rules));
    let mut push = |text: &str| {
        let delta = sample.push(&bytes_as_ids(text.as_bytes()), logprobs_for(&vec![0; text.len()], 0));
        (delta.text, delta.stopped)
    };
    assert_eq!(push("aSTO"), ("aSTO".to_owned(), false));
    assert_eq!(push("PER"), ("P".to_owned(), true));
    assert_eq!(read(&rules, &bytes_as_ids(b"aabbbbaab"), &[9]).text, "aabb");
}

#[test]
fn b62_several_matches_in_one_token_cut_at_the_first() {
    let the = byte_level().encode(" the", rung_frontend::text::SpecialTokens::Omit).unwrap();
    assert_eq!(the.len(), 1, "one token");
    let delta = read(&rules(&["h", "e"], 0), &[&the[..], &the[..]].concat(), &[2]);
    assert_eq!((delta.text.as_str(), delta.token_ids.len(), delta.stopped), (" t", 1, true));
}

#[test]
fn only_a_live_prefix_is_held_back() {
    let mut sample = SampleText::new(rules(&["STOP", "TOY"], 0));
    let mut push =
        |text: &str| sample.push(&bytes_as_ids(text.as_bytes()), logprobs_for(&vec![0; text.len()], 0)).text;
    assert_eq!(push("abcS"), "abc");
    assert_eq!(push("TO"), "");
    // "STO" cannot go on with "X", nor can "TO".
    assert_eq!(push("X"), "STOX");
    assert_eq!(push("STOS"), "STO");
    assert_eq!(sample.finish().text, "S");
}

#[test]
fn b04_multi_byte_output_and_stops_of_any_length_never_cut_inside_a_character() {
    let text = "海は広いな大きいな月がのぼるし日が沈む🌊🌙海は広いな";
    for stop in ["§§never§§", "🌊🌙海は広いな大", "沈む🌙", "な月か", "a", "🌙🌊", "\u{FFFD}"]
    {
        assert_eq!(text_of(&[stop], text), (text.to_owned(), false), "{stop}");
    }
    assert_eq!(text_of(&["🌙"], text), ("海は広いな大きいな月がのぼるし日が沈む🌊".to_owned(), true));
}

#[test]
fn a_token_partly_visible_at_the_cut_is_kept() {
    let the = byte_level().encode(" the", rung_frontend::text::SpecialTokens::Omit).unwrap();
    let ids = [&bytes_as_ids(b"x")[..], &the[..], &bytes_as_ids(b"zz")[..]].concat();
    let delta = read(&rules(&["hez"], 0), &ids, &[1]);
    assert_eq!(delta.text, "x t");
    assert_eq!(delta.token_ids, ids[..2]);
    assert_eq!(delta.entries.len(), 2);
}

#[test]
fn stops_are_not_searched_in_the_first_min_tokens() {
    let ids = bytes_as_ids(b"abab");
    assert_eq!(read(&rules(&["ab"], 2), &ids, &[4]).text, "ab");
    // Neither may a match begin there.
    assert_eq!(read(&rules(&["ba"], 2), &ids, &[4]).text, "abab");
}

#[test]
fn control_tokens_and_the_ending_id_are_not_text_but_count() {
    let ids = [byte_id(b'a'), 1, byte_id(b'b'), IM_END];
    let delta = read(&rules(&[], 0), &ids, &[1]);
    assert_eq!(delta.text, "ab");
    assert_eq!(delta.token_ids, ids);
    let in_text: Vec<bool> = delta.entries.iter().map(|entry| entry.in_text).collect();
    assert_eq!(in_text, [true, false, true, false]);
}
