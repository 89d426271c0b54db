//! The fields that say what an answer must look like: OpenAI's `response_format`, and the names
//! that other servers have for the same. At most one of them may be used.

use std::borrow::Cow;

use serde_json::Value;

use super::fields::Fields;
use crate::engine::types::{Capability, ModelFacts};
use crate::error::ApiError;
use crate::grammar::Constraint;

/// A constraint, and the field that asked for it.
#[derive(Debug, Clone)]
pub(super) struct RequestedFormat {
    pub constraint: Constraint,
    pub param: Cow<'static, str>,
}

/// Reads all of the fields.
pub(super) fn format(fields: &mut Fields, facts: &ModelFacts) -> Result<Option<RequestedFormat>, ApiError> {
    let mut formats = Vec::new();
    if let Some(value) = fields.take("response_format") {
        formats.extend(response_format(value)?);
    }
    if let Some(value) = fields.take("structured_outputs") {
        formats.extend(structured_outputs(value)?);
    }
    for (name, kind) in GUIDED {
        if let Some(value) = fields.take(name) {
            formats.push(requested(*name, guided(name, *kind, value)?));
        }
    }
    if let [_, second, ..] = &formats[..] {
        let message = "Only one field may say what the answer must look like.";
        return Err(ApiError::invalid(second.param.clone(), message));
    }
    let format = formats.pop();
    if let Some(format) = &format
        && !facts.capabilities.has(Capability::Grammar)
    {
        let message = format!("{} is not offered by this engine; leave it out.", format.param);
        return Err(ApiError::unsupported(format.param.clone(), message));
    }
    Ok(format)
}

#[derive(Clone, Copy)]
enum Kind {
    Schema,
    Regex,
    Choice,
    Lark,
}

/// The flat names.
const GUIDED: &[(&str, Kind)] = &[
    ("guided_json", Kind::Schema),
    ("guided_regex", Kind::Regex),
    ("guided_choice", Kind::Choice),
    ("guided_grammar", Kind::Lark),
    ("json_schema", Kind::Schema),
    ("regex", Kind::Regex),
];

fn requested(param: impl Into<Cow<'static, str>>, constraint: Constraint) -> RequestedFormat {
    RequestedFormat { constraint, param: param.into() }
}

fn response_format(value: Value) -> Result<Option<RequestedFormat>, ApiError> {
    let param = "response_format";
    let Value::Object(object) = value else {
        return Err(ApiError::invalid(param, "response_format must be an object."));
    };
    let mut format = Fields::new(object);
    match format.take("type").as_ref().and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(requested(param, Constraint::JsonObject))),
        Some("json_schema") => {
            let Some(Value::Object(described)) = format.take("json_schema") else {
                let message = "response_format needs json_schema, an object with name and schema.";
                return Err(ApiError::invalid("response_format.json_schema", message));
            };
            let mut described = Fields::new(described);
            let strict = described.flag("strict")?;
            let Some(schema) = described.take("schema") else {
                let message = "response_format.json_schema needs a schema.";
                return Err(ApiError::invalid("response_format.json_schema.schema", message));
            };
            Ok(Some(requested("response_format", Constraint::JsonSchema { schema, strict })))
        }
        _ => Err(ApiError::invalid(
            "response_format.type",
            "response_format.type must be text, json_object or json_schema.",
        )),
    }
}

fn structured_outputs(value: Value) -> Result<Vec<RequestedFormat>, ApiError> {
    let Value::Object(object) = value else {
        return Err(ApiError::invalid("structured_outputs", "structured_outputs must be an object."));
    };
    let mut fields = Fields::new(object);
    let mut formats = Vec::new();
    let kinds =
        [("json", Kind::Schema), ("regex", Kind::Regex), ("choice", Kind::Choice), ("grammar", Kind::Lark)];
    for (name, kind) in kinds {
        if let Some(value) = fields.take(name) {
            let param = format!("structured_outputs.{name}");
            let constraint = guided(&param, kind, value)?;
            formats.push(requested(param, constraint));
        }
    }
    if fields.flag("json_object")? {
        formats.push(requested("structured_outputs.json_object", Constraint::JsonObject));
    }
    if fields.get("structural_tag").is_some() {
        let message = "structured_outputs.structural_tag is not supported by this server; leave it out.";
        return Err(ApiError::unsupported("structured_outputs.structural_tag", message));
    }
    Ok(formats)
}

fn guided(param: &str, kind: Kind, value: Value) -> Result<Constraint, ApiError> {
    let invalid = |what: &str| Err(ApiError::invalid(param.to_owned(), format!("{param} must be {what}.")));
    match (kind, value) {
        // Some clients send the schema as text.
        (Kind::Schema, Value::String(text)) => match serde_json::from_str(&text) {
            Ok(schema) => Ok(Constraint::JsonSchema { schema, strict: false }),
            Err(_) => invalid("a JSON schema"),
        },
        (Kind::Schema, schema) => Ok(Constraint::JsonSchema { schema, strict: false }),
        (Kind::Regex, Value::String(pattern)) => Ok(Constraint::Regex(pattern)),
        (Kind::Regex, _) => invalid("a regular expression"),
        (Kind::Lark, Value::String(text)) => Ok(Constraint::Lark(text)),
        (Kind::Lark, _) => invalid("a Lark grammar"),
        (Kind::Choice, Value::Array(items)) => {
            let choices = items.into_iter().map(|item| match item {
                Value::String(choice) => Some(choice),
                _ => None,
            });
            choices
                .collect::<Option<_>>()
                .map_or_else(|| invalid("a list of strings"), |list| Ok(Constraint::Choice(list)))
        }
        (Kind::Choice, _) => invalid("a list of strings"),
    }
}
