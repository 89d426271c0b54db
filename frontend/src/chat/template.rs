//! A model's chat template, compiled once. Jinja as Hugging Face models use it, bounded in work.

use std::borrow::Cow;
use std::fmt;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind, context};

use super::values::{RAISED, add_python_names};

const NAME: &str = "chat";

/// Template instructions per rendering: about a second of work, and far above what a chat of
/// ten thousand turns takes.
const FUEL: u64 = 5_000_000;

/// Why a template cannot be compiled or a chat not be rendered.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The template's own text is at fault.
    #[error("the chat template cannot be compiled: {0}")]
    Compile(String),
    /// The template refused the chat, in its own words.
    #[error("{0}")]
    Raised(String),
    /// The template could not render this chat.
    #[error("the chat template cannot render these messages: {0}")]
    Render(String),
    /// Too much work.
    #[error("the chat is too large for the chat template; send fewer or shorter messages")]
    TooLarge,
}

/// What a template is given.
#[derive(Debug, Clone, Copy)]
pub struct RenderInput<'a> {
    /// From `normalize_messages`.
    pub messages: &'a [serde_json::Value],
    /// Whether the prompt ends where the assistant's answer begins.
    pub add_generation_prompt: bool,
    /// Text of the beginning-of-text token; empty when there is none.
    pub bos_token: &'a str,
    /// Text of the end-of-text token; empty when there is none.
    pub eos_token: &'a str,
}

/// A compiled template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    knows_developer: bool,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("ChatTemplate")
            .field("knows_developer", &self.knows_developer)
            .finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Compiles the source of a `chat_template`.
    pub fn compile(source: &str) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        let compile = |error: minijinja::Error| TemplateError::Compile(error.to_string());
        let syntax =
            SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(compile)?;
        environment.set_syntax(syntax);
        environment.set_fuel(Some(FUEL));
        add_python_names(&mut environment);
        environment
            .add_template_owned(NAME, without_generation_tags(source).into_owned())
            .map_err(compile)?;
        Ok(Self { environment, knows_developer: source.contains("developer") })
    }

    /// The prompt text of a chat.
    pub fn render(&self, input: RenderInput<'_>) -> Result<String, TemplateError> {
        let messages: Vec<minijinja::Value> =
            input.messages.iter().map(|message| self.message_value(message)).collect();
        let template =
            self.environment.get_template(NAME).map_err(|error| TemplateError::Compile(error.to_string()))?;
        let values = context! {
            messages,
            add_generation_prompt => input.add_generation_prompt,
            bos_token => input.bos_token,
            eos_token => input.eos_token,
        };
        template.render(values).map_err(|error| explain(&error))
    }

    /// A developer turn is a system turn to templates that do not know the newer name.
    fn message_value(&self, message: &serde_json::Value) -> minijinja::Value {
        if !self.knows_developer && message["role"] == "developer" {
            let mut message = message.clone();
            message["role"] = "system".into();
            return Serde(message).into();
        }
        Serde(message).into()
    }
}

/// The sentence for the client: the template's message, never its source or line numbers.
fn explain(error: &minijinja::Error) -> TemplateError {
    if error.kind() == ErrorKind::OutOfFuel {
        return TemplateError::TooLarge;
    }
    let detail = error.detail().unwrap_or_default();
    match detail.strip_prefix(RAISED) {
        Some(message) => TemplateError::Raised(message.to_owned()),
        None => TemplateError::Render(if detail.is_empty() {
            error.kind().to_string()
        } else {
            detail.to_owned()
        }),
    }
}

/// `{% generation %}` marks training targets and changes nothing in the text. It becomes a block
/// that is always taken, which keeps the tag's whitespace control.
fn without_generation_tags(source: &str) -> Cow<'_, str> {
    if !source.contains("generation") {
        return Cow::Borrowed(source);
    }
    let mut result = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let Some(close) = rest[open..].find("%}").map(|at| open + at) else {
            break;
        };
        let inside = &rest[open + 2..close];
        let name = inside.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        let replacement = match name {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        result.push_str(&rest[..open + 2]);
        match replacement {
            Some(tag) => result.push_str(&inside.replace(name, tag)),
            None => result.push_str(inside),
        }
        result.push_str("%}");
        rest = &rest[close + 2..];
    }
    result.push_str(rest);
    Cow::Owned(result)
}
