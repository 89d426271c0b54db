//! Chats to prompt text: messages as clients send them, rendered by the model's own template.

mod messages;
mod template;
mod values;

pub use messages::{MessageError, normalize_messages};
pub use template::{ChatTemplate, RenderInput, TemplateError};
