//! Checks the messages of a chat and brings them to the form that templates expect. Fields that
//! only a template can judge (`name`, `tool_calls`, …) are passed through as they came.

use serde_json::{Map, Value};

/// What is wrong with the messages.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct MessageError {
    /// Where, such as `messages[2].content`.
    pub param: String,
    /// One sentence.
    pub message: String,
}

const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// Every message with a known role and its content as one string.
pub fn normalize_messages(messages: Value) -> Result<Vec<Value>, MessageError> {
    let error = |message: &str| MessageError { param: "messages".to_owned(), message: message.to_owned() };
    let Value::Array(messages) = messages else {
        return Err(error("messages must be a list of messages."));
    };
    if messages.is_empty() {
        return Err(error("messages must hold at least one message."));
    }
    messages.into_iter().enumerate().map(|(index, message)| normalize(index, message)).collect()
}

fn normalize(index: usize, message: Value) -> Result<Value, MessageError> {
    let path = format!("messages[{index}]");
    let Value::Object(mut message) = message else {
        return Err(MessageError { message: format!("{path} must be an object."), param: path });
    };
    let role = match message.get("role").and_then(Value::as_str) {
        Some(role) if ROLES.contains(&role) => role.to_owned(),
        _ => {
            let known = ROLES.join(", ");
            return Err(MessageError {
                message: format!("{path}.role must be one of: {known}."),
                param: format!("{path}.role"),
            });
        }
    };
    let content = message.remove("content").unwrap_or(Value::Null);
    let text = content_text(&format!("{path}.content"), &role, content)?;
    let mut normal = Map::new();
    normal.insert("role".to_owned(), Value::String(role));
    normal.insert("content".to_owned(), Value::String(text));
    message.remove("role");
    normal.extend(message);
    Ok(Value::Object(normal))
}

/// A string as it is; text parts joined by line breaks. An assistant turn may have none, as the
/// server itself sends it beside tool calls.
fn content_text(path: &str, role: &str, content: Value) -> Result<String, MessageError> {
    let error = |param: String, message: String| Err(MessageError { param, message });
    match content {
        Value::String(text) => Ok(text),
        Value::Null if role == "assistant" => Ok(String::new()),
        Value::Array(parts) => {
            let mut texts = Vec::with_capacity(parts.len());
            for (index, part) in parts.into_iter().enumerate() {
                texts.push(part_text(format!("{path}[{index}]"), part)?);
            }
            Ok(texts.join("\n"))
        }
        _ => error(path.to_owned(), format!("{path} must be a string or a list of text parts.")),
    }
}

fn part_text(path: String, mut part: Value) -> Result<String, MessageError> {
    let kind = part.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
    let field = match kind.as_str() {
        "text" | "refusal" => kind.as_str(),
        "" => {
            let message = format!("{path} must be an object with a type.");
            return Err(MessageError { param: path, message });
        }
        other => {
            let message = format!("{path} is of type {other:?}; this model takes only text parts.");
            return Err(MessageError { param: path, message });
        }
    };
    match part.get_mut(field).map(Value::take) {
        Some(Value::String(text)) => Ok(text),
        _ => Err(MessageError {
            message: format!("{path}.{field} must be a string."),
            param: format!("{path}.{field}"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn strings_parts_and_missing_assistant_content_become_strings() {
        let messages = normalize_messages(json!([
            {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "", "id": 17},
            {"role": "assistant", "content": null, "tool_calls": []},
            {"role": "assistant"},
            {"role": "assistant", "content": []},
        ]))
        .unwrap();
        let contents: Vec<&Value> = messages.iter().map(|message| &message["content"]).collect();
        assert_eq!(contents, ["a\nb", "", "", "", ""]);
        assert_eq!(messages[1]["id"], 17);
        assert_eq!(messages[2]["tool_calls"], json!([]));
    }

    #[test]
    fn each_fault_names_its_place() {
        let cases = [
            (json!(7), "messages"),
            (json!([]), "messages"),
            (json!(["x"]), "messages[0]"),
            (json!([{}]), "messages[0].role"),
            (json!([{"role": "USER", "content": "x"}]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (json!([{"role": "user", "content": null}]), "messages[0].content"),
            (json!([{"role": "user", "content": 5}]), "messages[0].content"),
            (json!([{"role": "user", "content": ["x"]}]), "messages[0].content[0]"),
            (
                json!([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
                "messages[0].content[0]",
            ),
            (json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
        ];
        for (messages, param) in cases {
            assert_eq!(normalize_messages(messages).unwrap_err().param, param);
        }
    }
}
