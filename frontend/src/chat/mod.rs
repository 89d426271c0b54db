//! Chat templates.

/// A compiled template.
#[derive(Debug)]
pub struct ChatTemplate;
