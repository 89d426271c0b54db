//! Bytes to text: equal to the standard library's lossy decoding, however the bytes are cut.

#![expect(clippy::unwrap_used, reason = "tests")]

mod support;

use proptest::prelude::*;
use rung_frontend::text::{Detokenizer, LeadingSpace, SpecialTokens, Tokenizer, TokenizerError};
use serde_json::{Value, json};
use support::{IM_END, IM_START, VOCAB_SIZE, byte_fallback, byte_level};

/// Bytes that are often almost UTF-8.
fn near_utf8() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        "[a-zé€🌊\u{FFFD}]{0,4}".prop_map(String::into_bytes),
        prop::collection::vec(any::<u8>(), 0..3),
        prop::sample::select(vec![
            &b"\xF0\x9F"[..],
            b"\xE2\x82",
            b"\xC0\x80",
            b"\xED\xA0\x80",
            b"\xF4\x90",
            b"\xF0\x80"
        ])
        .prop_map(<[u8]>::to_vec),
    ];
    prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn any_cut_of_any_bytes_decodes_like_the_whole(
        bytes in near_utf8(),
        sizes in prop::collection::vec(0usize..5, 1..8),
    ) {
        let mut detokenizer = Detokenizer::new(LeadingSpace::Keep);
        let mut text = String::new();
        let mut rest = &bytes[..];
        let mut sizes = sizes.iter().copied().cycle();
        let mut empties = 0;
        while !rest.is_empty() {
            let size = if empties > 8 { 1 } else { sizes.next().unwrap() };
            empties = if size == 0 { empties + 1 } else { 0 };
            let (token, later) = rest.split_at(size.min(rest.len()));
            detokenizer.push(token, &mut text);
            rest = later;
        }
        detokenizer.finish(&mut text);
        prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn encoding_then_decoding_gives_the_text_back(text in "\\PC{0,40}") {
        for tokenizer in [byte_level(), byte_fallback()] {
            let ids = tokenizer.encode(&text, SpecialTokens::Omit).unwrap();
            let mut detokenizer = Detokenizer::new(tokenizer.leading_space());
            let mut decoded = String::new();
            for id in ids {
                detokenizer.push(tokenizer.vocabulary().bytes(id), &mut decoded);
            }
            detokenizer.finish(&mut decoded);
            prop_assert_eq!(&decoded, &text);
        }
    }

    #[test]
    fn the_least_count_of_tokens_is_a_lower_bound(text in "[a-z ]{0,200}") {
        let tokenizer = byte_level();
        prop_assert!(tokenizer.min_tokens(text.len()) <= tokenizer.encode(&text, SpecialTokens::Omit).unwrap().len());
    }
}

#[test]
fn each_maximal_ill_formed_part_is_one_replacement() {
    // The table of Unicode 15, section 3.9, "U+FFFD Substitution of Maximal Subparts".
    let cases: [(&[u8], &str); 4] = [
        (
            b"\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41",
            "\u{FFFD}\u{FFFD}\u{FFFD}\u{FFFD}\u{FFFD}\u{FFFD}\u{FFFD}\u{FFFD}A",
        ),
        (
            b"\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41",
            "\u{FFFD}\u{FFFD}\u{FFFD}\u{FFFD}\u{FFFD}\u{FFFD}\u{FFFD}\u{FFFD}A",
        ),
        (
            b"\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42",
            "\u{FFFD}\u{FFFD}\u{FFFD}\u{FFFD}\u{FFFD}A\u{FFFD}\u{FFFD}B",
        ),
        (b"\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41", "\u{FFFD}\u{FFFD}\u{FFFD}\u{FFFD}A"),
    ];
    for (bytes, expected) in cases {
        let mut detokenizer = Detokenizer::new(LeadingSpace::Keep);
        let mut text = String::new();
        for byte in bytes {
            detokenizer.push(&[*byte], &mut text);
        }
        assert_eq!(text, expected);
    }
}

#[test]
fn an_unfinished_character_waits_and_is_one_replacement_at_the_end() {
    let mut detokenizer = Detokenizer::new(LeadingSpace::Keep);
    let mut text = String::new();
    for byte in b"\xF0\x9F\x8C" {
        detokenizer.push(&[*byte], &mut text);
        assert_eq!(text, "");
    }
    detokenizer.finish(&mut text);
    assert_eq!(text, "\u{FFFD}");
}

#[test]
fn b54_one_leading_space_is_dropped_at_the_start_of_an_answer_only() {
    let decode = |leading: LeadingSpace, tokens: &[&str]| {
        let mut detokenizer = Detokenizer::new(leading);
        let mut text = String::new();
        for token in tokens {
            detokenizer.push(token.as_bytes(), &mut text);
        }
        text
    };
    assert_eq!(decode(LeadingSpace::Strip, &["", " ", " He", " y"]), " He y");
    assert_eq!(decode(LeadingSpace::Strip, &["  a"]), " a");
    assert_eq!(decode(LeadingSpace::Strip, &["a", " b"]), "a b");
    assert_eq!(decode(LeadingSpace::Keep, &[" a"]), " a");
    assert_eq!(byte_level().leading_space(), LeadingSpace::Keep);
    assert_eq!(byte_fallback().leading_space(), LeadingSpace::Strip);
}

#[test]
fn special_tokens_are_known_and_added_words_are_text() {
    let vocabulary = byte_level();
    let vocabulary = vocabulary.vocabulary();
    assert!(vocabulary.is_special(IM_START) && vocabulary.is_special(IM_END));
    let think = (0..VOCAB_SIZE).find(|&id| vocabulary.bytes(id) == b"<think>").unwrap();
    assert!(!vocabulary.is_special(think));
    assert_eq!(vocabulary.bytes(VOCAB_SIZE + 1), b"");
    let ids = byte_level().encode("<|im_start|>user", SpecialTokens::Omit).unwrap();
    assert_eq!(ids[0], IM_START);
}

#[test]
fn rows_beyond_the_tokenizer_have_no_bytes_and_ids_beyond_the_model_are_refused() {
    let json = include_bytes!("fixtures/byte_level.json");
    let padded = Tokenizer::from_json(json, VOCAB_SIZE + 6).unwrap();
    assert_eq!(padded.vocabulary().bytes(VOCAB_SIZE + 3), b"");
    let short = Tokenizer::from_json(json, VOCAB_SIZE - 1).unwrap();
    let error = short.encode("</think>", SpecialTokens::Omit).unwrap_err();
    assert!(matches!(error, TokenizerError::OutsideVocabulary { id: 601, vocab_size: 601 }), "{error}");
}

#[test]
fn tokenizers_whose_bytes_are_not_defined_are_refused() {
    let base: Value = serde_json::from_slice(include_bytes!("fixtures/byte_level.json")).unwrap();
    let with = |decoder: Value| {
        let mut json = base.clone();
        json["decoder"] = decoder;
        Tokenizer::from_json(json.to_string().as_bytes(), VOCAB_SIZE)
    };
    for decoder in [
        Value::Null,
        json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
        json!({"type": "Strip", "content": " ", "start": 2, "stop": 0}),
        json!({"type": "Fuse"}),
    ] {
        assert!(matches!(with(decoder.clone()), Err(TokenizerError::Unsupported(_))), "{decoder}");
    }
    assert!(
        with(json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}))
            .is_ok()
    );
    assert!(matches!(Tokenizer::from_json(b"{", 1), Err(TokenizerError::Malformed(_))));
}

#[test]
fn a_decoder_that_does_something_else_than_the_table_is_caught() {
    let mut json: Value = serde_json::from_slice(include_bytes!("fixtures/byte_fallback.json")).unwrap();
    // Replaces after the bytes are joined, so `<0x7A>` is not the byte that it says.
    json["decoder"] = json!({"type": "Sequence", "decoders": [
        {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Replace", "pattern": {"String": "z"}, "content": "y"},
    ]});
    let error = Tokenizer::from_json(json.to_string().as_bytes(), 362).unwrap_err();
    assert!(matches!(error, TokenizerError::Mismatch { .. }), "{error}");
}

#[test]
fn a_stored_truncation_is_ignored() {
    let mut json: Value = serde_json::from_slice(include_bytes!("fixtures/byte_level.json")).unwrap();
    json["truncation"] =
        json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    let tokenizer = Tokenizer::from_json(json.to_string().as_bytes(), VOCAB_SIZE).unwrap();
    assert!(tokenizer.encode("The capital of France", SpecialTokens::Omit).unwrap().len() > 2);
}
