//! The kinds of constraints that a request may name, and each as a grammar of llguidance.

use std::fmt::Write;

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::{Value, json};

use super::GrammarError;
use super::limits::MAX_SOURCE_BYTES;

/// White space between the parts of a JSON text: enough for a readable layout, and no endless run.
const JSON_WHITESPACE: &str = r"[ \n\r\t]{1,16}";

/// What an answer must look like.
#[derive(Debug, Clone, PartialEq)]
pub enum Constraint {
    /// JSON that satisfies a schema. Keywords that cannot be enforced are an error if `strict`, and
    /// are ignored or approximated otherwise.
    JsonSchema {
        /// An object, or true.
        schema: Value,
        /// Whether every keyword must be enforced.
        strict: bool,
    },
    /// Any JSON object.
    JsonObject,
    /// Text that a regular expression matches whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A text of a Lark grammar, in llguidance's dialect, from its rule `start`.
    Lark(String),
    /// Calls of tools between tags.
    Calls(Calls),
}

/// Calls of tools: text of the model's own format around arguments that satisfy a schema.
#[derive(Debug, Clone, PartialEq)]
pub struct Calls {
    /// One per tool that may be called; at least one.
    pub tags: Vec<Tag>,
    /// Whether there must be a call, with nothing before it. Else the answer is free text in which
    /// calls may occur, each recognised by the first literal of its tag.
    pub required: bool,
    /// At most one call; only where one is required.
    pub single: bool,
    /// Between one call and the next, where calls are required.
    pub separator: String,
}

/// How one tool is called.
#[derive(Debug, Clone, PartialEq)]
pub struct Tag {
    /// Ahead of the arguments; at least one.
    pub begin: Vec<Literal>,
    /// Schema of the arguments.
    pub schema: Value,
    /// After the arguments.
    pub end: Vec<Literal>,
}

/// Fixed text of a tag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Literal {
    /// Plain text, not empty.
    Text(String),
    /// One special token.
    Special(u32),
}

impl Constraint {
    /// The constraint as a grammar, which may still turn out to be wrong.
    pub(super) fn grammar(&self) -> Result<TopLevelGrammar, GrammarError> {
        let grammar = match self {
            Self::JsonSchema { schema, strict } => json_grammar(schema, *strict)?,
            Self::JsonObject => json_grammar(&json!({"type": "object"}), true)?,
            Self::Regex(pattern) => {
                check_source("The pattern", pattern.len())?;
                GrammarWithLexer::from_regex(whole(pattern))
            }
            Self::Choice(choices) => GrammarWithLexer::from_lark(choice_lark(choices)?),
            Self::Lark(text) => {
                check_source("The grammar", text.len())?;
                GrammarWithLexer::from_lark(text.clone())
            }
            Self::Calls(calls) => GrammarWithLexer::from_lark(calls.lark()?),
        };
        // A name is for grammars that refer to each other.
        Ok(TopLevelGrammar::from_grammar(GrammarWithLexer { name: None, ..grammar }))
    }
}

fn json_grammar(schema: &Value, strict: bool) -> Result<GrammarWithLexer, GrammarError> {
    Ok(GrammarWithLexer::from_json_schema(prepared_schema(schema, strict)?))
}

/// The schema with our options for it.
fn prepared_schema(schema: &Value, strict: bool) -> Result<Value, GrammarError> {
    let mut schema = match schema {
        Value::Object(members) => members.clone(),
        Value::Bool(true) => serde_json::Map::new(),
        Value::Bool(false) => {
            return Err(GrammarError("The schema false allows no answer at all.".to_owned()));
        }
        _ => return Err(GrammarError("A JSON schema must be an object.".to_owned())),
    };
    // `oneOf` can be had as `anyOf` alone, which lets through what fits two of its schemas.
    let options =
        json!({"whitespace_pattern": JSON_WHITESPACE, "lenient": !strict, "coerce_one_of": !strict});
    schema.insert("x-guidance".to_owned(), options);
    let schema = Value::Object(schema);
    check_source("The schema", schema.to_string().len())?;
    Ok(schema)
}

/// A pattern that must match a whole text anyway, without the anchors that say so.
fn whole(pattern: &str) -> &str {
    let pattern = pattern.strip_prefix('^').unwrap_or(pattern);
    match pattern.strip_suffix('$') {
        // An odd number of backslashes makes the last sign a plain dollar.
        Some(rest) if rest.bytes().rev().take_while(|byte| *byte == b'\\').count().is_multiple_of(2) => rest,
        _ => pattern,
    }
}

fn choice_lark(choices: &[String]) -> Result<String, GrammarError> {
    if choices.is_empty() || choices.iter().any(String::is_empty) {
        return Err(GrammarError("There must be at least one choice, and none may be empty.".to_owned()));
    }
    check_source("The list of choices", choices.iter().map(|choice| choice.len() + 4).sum())?;
    let quoted: Vec<String> = choices.iter().map(|choice| quoted(choice)).collect();
    Ok(format!("start: {}", quoted.join(" | ")))
}

impl Calls {
    fn lark(&self) -> Result<String, GrammarError> {
        if self.tags.is_empty() || self.tags.iter().any(|tag| tag.begin.is_empty()) {
            return Err(GrammarError("There must be at least one tool, and each needs a tag.".to_owned()));
        }
        let names: Vec<String> = (0..self.tags.len()).map(|index| format!("tag_{index}")).collect();
        let any = names.join(" | ");
        let mut lark = "%llguidance {}\n".to_owned();
        let separator = if self.separator.is_empty() { String::new() } else { quoted(&self.separator) };
        match (self.required, self.single) {
            (true, true) => _ = writeln!(lark, "start: {any}"),
            (true, false) => _ = writeln!(lark, "start: call ({separator} call)*\ncall: {any}"),
            (false, _) => _ = writeln!(lark, "start: ({any})* text\ntext: TEXT\nTEXT: /(.|\\n)*/"),
        }
        for (name, tag) in names.iter().zip(&self.tags) {
            let (trigger, begin) = tag.begin.split_first().unwrap_or((&EMPTY, &[]));
            match (self.required, trigger) {
                (true, _) => _ = write!(lark, "{name}: {}", trigger.lark()),
                (false, Literal::Special(_)) => _ = write!(lark, "{name}: TEXT {}", trigger.lark()),
                (false, Literal::Text(_)) => {
                    _ = write!(lark, "{name}_trigger[lazy]: TEXT {}\n{name}: {name}_trigger", trigger.lark());
                }
            }
            for literal in begin {
                _ = write!(lark, " {}", literal.lark());
            }
            _ = write!(lark, " %json {}", prepared_schema(&tag.schema, false)?);
            for literal in &tag.end {
                _ = write!(lark, " {}", literal.lark());
            }
            lark.push('\n');
        }
        check_source("The schemas of all tools together", lark.len())?;
        Ok(lark)
    }
}

static EMPTY: Literal = Literal::Text(String::new());

impl Literal {
    fn lark(&self) -> String {
        match self {
            Self::Text(text) => quoted(text),
            Self::Special(id) => format!("<[{id}]>"),
        }
    }
}

/// A text as Lark writes it, which is as JSON does.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

fn check_source(what: &str, num_bytes: usize) -> Result<(), GrammarError> {
    if num_bytes <= MAX_SOURCE_BYTES {
        return Ok(());
    }
    Err(GrammarError(format!("{what} has {num_bytes} bytes; at most {MAX_SOURCE_BYTES} are taken.")))
}
