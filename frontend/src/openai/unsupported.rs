//! Fields that clients know from other servers and that would change the answer. Each is refused
//! unless its value asks for what happens anyway: ignoring one in silence would be a wrong answer.

use serde_json::Value;

use super::fields::Fields;
use crate::error::ApiError;

/// Which values of a field change nothing.
#[derive(Clone, Copy)]
enum Neutral {
    /// None.
    Nothing,
    /// `false`.
    False,
    /// `true`.
    True,
    /// Any boolean.
    AnyFlag,
    /// `[]` or `{}`.
    Empty,
    /// This number.
    Number(f64),
    /// One of these strings.
    Text(&'static [&'static str]),
    /// A list that holds `text` alone.
    TextModality,
}

const SHARED: &[(&str, Neutral)] = &[
    ("length_penalty", Neutral::Number(1.0)),
    ("use_beam_search", Neutral::False),
    ("skip_special_tokens", Neutral::True),
    ("spaces_between_special_tokens", Neutral::AnyFlag),
    ("truncate_prompt_tokens", Neutral::Nothing),
    ("ebnf", Neutral::Nothing),
];

const CHAT: &[(&str, Neutral)] = &[
    ("best_of", Neutral::Number(1.0)),
    ("echo", Neutral::False),
    ("tools", Neutral::Empty),
    ("tool_choice", Neutral::Text(&["none", "auto"])),
    ("parallel_tool_calls", Neutral::AnyFlag),
    ("functions", Neutral::Empty),
    ("function_call", Neutral::Text(&["none", "auto"])),
    ("audio", Neutral::Nothing),
    ("modalities", Neutral::TextModality),
    ("prediction", Neutral::Nothing),
    ("web_search_options", Neutral::Nothing),
    ("chat_template", Neutral::Nothing),
    ("chat_template_kwargs", Neutral::Empty),
    ("documents", Neutral::Empty),
    ("add_generation_prompt", Neutral::True),
    ("continue_final_message", Neutral::False),
    ("add_special_tokens", Neutral::False),
];

const COMPLETIONS: &[(&str, Neutral)] = &[
    ("suffix", Neutral::Text(&[""])),
    ("add_special_tokens", Neutral::True),
    ("prompt_embeds", Neutral::Nothing),
];

/// For chat completions.
pub(super) fn refuse_in_chat(fields: &Fields) -> Result<(), ApiError> {
    refuse(fields, SHARED)?;
    refuse(fields, CHAT)
}

/// For completions.
pub(super) fn refuse_in_completions(fields: &Fields) -> Result<(), ApiError> {
    refuse(fields, SHARED)?;
    refuse(fields, COMPLETIONS)
}

fn refuse(fields: &Fields, table: &'static [(&'static str, Neutral)]) -> Result<(), ApiError> {
    for &(name, neutral) in table {
        if let Some(value) = fields.get(name)
            && !is_neutral(value, neutral)
        {
            return Err(ApiError::unsupported(
                name,
                format!("{name} is not supported by this server; leave it out."),
            ));
        }
    }
    Ok(())
}

fn is_neutral(value: &Value, neutral: Neutral) -> bool {
    match neutral {
        Neutral::Nothing => false,
        Neutral::False => value == &Value::Bool(false),
        Neutral::True => value == &Value::Bool(true),
        Neutral::AnyFlag => value.is_boolean(),
        Neutral::Empty => {
            value.as_array().is_some_and(Vec::is_empty)
                || value.as_object().is_some_and(serde_json::Map::is_empty)
        }
        Neutral::Number(number) => value.as_f64() == Some(number),
        Neutral::Text(texts) => value.as_str().is_some_and(|text| texts.contains(&text)),
        Neutral::TextModality => value.as_array().is_some_and(|list| list.iter().all(|item| item == "text")),
    }
}
