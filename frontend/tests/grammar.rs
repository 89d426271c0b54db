//! Constraints to grammars: a corpus that the engine's tests share, limits, and special tokens.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::fmt::Write;
use std::sync::Arc;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use rung_frontend::grammar::{Calls, Constraint, GrammarCompiler, Literal, MAX_SOURCE_BYTES, Tag};
use rung_frontend::text::Tokenizer;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

const EOS: u32 = 256;
const CALL: u32 = 257;
const CORPUS: &str = include_str!("../../tests/contract/grammar_corpus.json");

/// Id b is byte b, 256 ends an answer, and 257 is a special token.
fn tokenizer() -> Arc<Tokenizer> {
    let is_shown = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut vocabulary = serde_json::Map::new();
    let mut extra = 256;
    for byte in 0..=255u8 {
        let stands_for = if is_shown(byte) { u32::from(byte) } else { extra };
        extra += u32::from(!is_shown(byte));
        vocabulary.insert(char::from_u32(stands_for).unwrap().to_string(), byte.into());
    }
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "special": true, "normalized": false, "single_word": false,
               "lstrip": false, "rstrip": false})
    };
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let json = json!({
        "version": "1.0",
        "added_tokens": [special(EOS, "<eos>"), special(CALL, "<call>")],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    });
    Arc::new(Tokenizer::from_json(json.to_string().as_bytes(), CALL + 1).unwrap())
}

fn compiler() -> GrammarCompiler {
    GrammarCompiler::new(tokenizer(), &[EOS])
}

fn constraint(value: &Value) -> Constraint {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let (kind, argument) = value.as_object().unwrap().iter().next().unwrap();
    match kind.as_str() {
        "json_schema" => {
            Constraint::JsonSchema { schema: argument.clone(), strict: value["strict"] == json!(true) }
        }
        "json_object" => Constraint::JsonObject,
        "regex" => Constraint::Regex(text(argument)),
        "choice" => Constraint::Choice(argument.as_array().unwrap().iter().map(text).collect()),
        "lark" => Constraint::Lark(text(argument)),
        "calls" => {
            let literals = |value: &Value| match value.as_str().unwrap() {
                "" => Vec::new(),
                text => vec![Literal::Text(text.to_owned())],
            };
            let tag = |tag: &Value| Tag {
                begin: literals(&tag["begin"]),
                schema: tag["schema"].clone(),
                end: literals(&tag["end"]),
            };
            Constraint::Calls(Calls {
                tags: argument["tags"].as_array().unwrap().iter().map(tag).collect(),
                required: argument["required"] == json!(true),
                single: argument["single"] == json!(true),
                separator: text(&argument["separator"]),
            })
        }
        other => panic!("no such constraint: {other}"),
    }
}

fn byte_env() -> TokEnv {
    let mut words: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    words.push(b"\xFF<eos>".to_vec());
    let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, EOS), &words).with_eos_tokens(&[EOS]);
    Arc::new(ApproximateTokEnv::new(trie))
}

fn matcher(grammar: &str) -> Matcher {
    let mut factory = ParserFactory::new(&byte_env(), InferenceCapabilities::default(), &[]).unwrap();
    *factory.limits_mut() = ParserLimits { max_items_in_row: 10_000, ..ParserLimits::default() };
    factory.quiet();
    let grammar: TopLevelGrammar = serde_json::from_str(grammar).unwrap();
    Matcher::new(factory.create_parser(grammar))
}

/// Whether a grammar takes a whole text, and the hash of all masks on the way to its end.
fn follow(grammar: &str, text: &str) -> (bool, String) {
    let mut matcher = matcher(grammar);
    let mut masks = Sha256::new();
    for byte in text.bytes() {
        let mask = matcher.compute_mask_or_eos().unwrap();
        for word in mask.as_slice() {
            masks.update(word.to_le_bytes());
        }
        if matcher.consume_token(u32::from(byte)).is_err() {
            return (false, String::new());
        }
    }
    let hash = masks.finalize().iter().fold(String::new(), |mut text, byte| {
        _ = write!(text, "{byte:02x}");
        text
    });
    (matcher.is_accepting().unwrap(), hash)
}

#[test]
fn b01_b22_b24_the_corpus_compiles_accepts_and_rejects_as_it_says() {
    let compiler = compiler();
    let mut results = Vec::new();
    let mut wrong = Vec::new();
    for case in serde_json::from_str::<Vec<Value>>(CORPUS).unwrap() {
        let name = &case["name"];
        let compiled = compiler.compile(&constraint(&case["constraint"]));
        if let Some(part) = case["error"].as_str() {
            let message =
                compiled.map_or_else(|error| error.to_string(), |grammar| format!("compiled: {grammar}"));
            if !message.contains(part) || !message.ends_with('.') || message.contains('\n') {
                wrong.push(format!("{name}: {message:?} is not about {part:?}"));
            }
            continue;
        }
        let grammar = compiled.unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut masks = Vec::new();
        for text in case["accepts"].as_array().unwrap() {
            let (accepted, hash) = follow(&grammar, text.as_str().unwrap());
            if !accepted {
                wrong.push(format!("{name} must accept {text}"));
            }
            masks.push(hash);
        }
        for text in case["rejects"].as_array().unwrap() {
            if follow(&grammar, text.as_str().unwrap()).0 {
                wrong.push(format!("{name} must reject {text}"));
            }
        }
        results.push(json!({"name": name, "grammar": grammar.as_ref(), "masks": masks}));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // The engine's tests read this snapshot.
    insta::assert_json_snapshot!("grammar_corpus", results);
}

#[test]
fn b21_what_could_cost_too_much_is_refused_or_compiles_within_the_limits() {
    let compiler = compiler();
    let schema = |schema| Constraint::JsonSchema { schema, strict: false };
    let long = "x".repeat(MAX_SOURCE_BYTES + 1);
    for constraint in [
        schema(json!({"enum": [long.clone()]})),
        Constraint::Regex(long.clone()),
        Constraint::Lark(long.clone()),
        Constraint::Choice(vec![long]),
    ] {
        let message = compiler.compile(&constraint).unwrap_err().to_string();
        assert!(message.contains("bytes; at most"), "{message}");
    }
    // Whether these pass is the library's matter; that they end, and end in words, is ours.
    let many: Vec<String> = (0..20_000).map(|index| format!("choice {index}")).collect();
    let properties: serde_json::Map<String, Value> = (0..3000)
        .map(|index| (format!("field_{index}"), json!({"type": "string", "pattern": "^[a-z]{2,9}$"})))
        .collect();
    let deep = (0..400).fold(json!({"type": "string"}), |inner, _| json!({"type": "array", "items": inner}));
    for constraint in [
        Constraint::Regex("((a?){30}){30}(a{1,500}){1,500}".to_owned()),
        Constraint::Regex("(x+x+)+y".to_owned()),
        Constraint::Choice(many),
        schema(json!({"type": "object", "properties": properties})),
        schema(json!({"type": "string", "minLength": 1_000_000})),
        schema(deep),
        schema(json!({"$ref": "#"})),
        Constraint::Lark("start: \"a\" start".to_owned()),
        Constraint::Lark("start: s\ns: s s | \"a\" | \"\"".to_owned()),
    ] {
        if let Err(error) = compiler.compile(&constraint) {
            assert!(error.to_string().ends_with('.'), "{error}");
        }
    }
}

#[test]
fn a_tag_may_begin_with_a_special_token() {
    let tag = Tag {
        begin: vec![Literal::Special(CALL), Literal::Text("f".to_owned())],
        schema: json!({"type": "object", "additionalProperties": false}),
        end: vec![Literal::Special(EOS)],
    };
    for required in [true, false] {
        let calls = Calls { tags: vec![tag.clone()], required, single: required, separator: String::new() };
        let grammar = compiler().compile(&Constraint::Calls(calls)).unwrap();
        assert!(grammar.contains("<[257]> \\\"f\\\""), "{grammar}");
    }
}

#[test]
fn a_model_without_an_end_cannot_follow_grammars() {
    for eos in [&[][..], &[10_000]] {
        let compiler = GrammarCompiler::new(tokenizer(), eos);
        let message = compiler.compile(&Constraint::JsonObject).unwrap_err().to_string();
        assert!(message.contains("no token that ends"), "{message}");
    }
}
