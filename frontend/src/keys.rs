//! The API keys that are accepted: read from a file, read again when it changes, compared in
//! constant time. A key's identity keeps its holder's cached prefixes apart from others'.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use sha2::{Digest, Sha256};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};
use tokio::signal::unix::{SignalKind, signal};

/// How soon a changed file is noticed without a signal.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);

/// Who holds a key, without telling the key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct KeyIdentity([u8; 32]);

impl fmt::Debug for KeyIdentity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("KeyIdentity")
    }
}

impl KeyIdentity {
    fn of(key: &[u8]) -> Self {
        Self(Sha256::new().chain_update(b"rung key\0").chain_update(key).finalize().into())
    }
}

/// What a request's cached prefixes are kept under: the key that it came with and its own salt,
/// each in a place of its own, so that no choice of one can look like another. `None`: shared by
/// all that have neither.
pub fn cache_salt(identity: Option<&KeyIdentity>, salt: Option<&str>) -> Option<[u8; 32]> {
    if identity.is_none() && salt.is_none() {
        return None;
    }
    let mut hash = Sha256::new().chain_update(b"rung cache salt\0");
    match identity {
        Some(identity) => hash.update([&[1], &identity.0[..]].concat()),
        None => hash.update([0]),
    }
    if let Some(salt) = salt {
        hash.update([1]);
        hash.update(salt);
    }
    Some(hash.finalize().into())
}

/// The accepted keys.
pub struct Keyring {
    file: Option<PathBuf>,
    /// One identity per key; empty: no key is asked for.
    identities: ArcSwap<Vec<KeyIdentity>>,
}

impl fmt::Debug for Keyring {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Keyring").field("file", &self.file).finish_non_exhaustive()
    }
}

impl Keyring {
    /// These keys for good; none of them: requests need no key.
    pub fn fixed<S: AsRef<str>>(keys: &[S]) -> Self {
        let identities = keys.iter().map(|key| KeyIdentity::of(key.as_ref().as_bytes())).collect();
        Self { file: None, identities: ArcSwap::from_pointee(identities) }
    }

    /// The keys of a file.
    pub fn from_file(path: &Path) -> Result<Self, String> {
        let keyring = Self { file: Some(path.to_owned()), ..Self::fixed(&read_keys(path)?) };
        Ok(keyring)
    }

    /// Whether anyone may ask without a key.
    pub fn is_open(&self) -> bool {
        self.file.is_none() && self.identities.load().is_empty()
    }

    /// Whose key this is. Every key is compared in full, so that time tells neither which one nor
    /// how much of it matched.
    pub fn identify(&self, key: &[u8]) -> Option<KeyIdentity> {
        let asked = KeyIdentity::of(key);
        let mut found = Choice::from(0);
        let mut identity = [0; 32];
        for known in self.identities.load().iter() {
            let is_same = known.0.ct_eq(&asked.0);
            for (byte, own) in identity.iter_mut().zip(known.0) {
                byte.conditional_assign(&own, is_same);
            }
            found |= is_same;
        }
        bool::from(found).then_some(KeyIdentity(identity))
    }

    /// Reads the file again. When it cannot be used, the keys stay as they were.
    pub fn reload(&self) -> Result<usize, String> {
        let Some(path) = &self.file else { return Ok(self.identities.load().len()) };
        let fresh = Self::fixed(&read_keys(path)?).identities.load_full();
        let count = fresh.len();
        self.identities.store(fresh);
        Ok(count)
    }

    /// Reloads at SIGHUP and when the file's date changes, for as long as it is polled.
    pub async fn follow(self: Arc<Self>) -> std::io::Result<()> {
        if self.file.is_none() {
            return Ok(());
        }
        let mut hangups = signal(SignalKind::hangup())?;
        let mut seen = self.changed_at();
        loop {
            let is_asked = tokio::select! {
                _ = hangups.recv() => true,
                () = tokio::time::sleep(LOOK_INTERVAL) => false,
            };
            let keyring = Arc::clone(&self);
            let looked = tokio::task::spawn_blocking(move || {
                let now = keyring.changed_at();
                ((is_asked || now != seen).then(|| keyring.reload()), now)
            });
            let Ok((outcome, now)) = looked.await else { continue };
            seen = now;
            match outcome {
                Some(Ok(count)) => tracing::info!(count, "read the API keys again"),
                Some(Err(error)) => tracing::error!("the API keys stay as they were: {error}"),
                None => {}
            }
        }
    }

    fn changed_at(&self) -> Option<SystemTime> {
        fs::metadata(self.file.as_ref()?).and_then(|facts| facts.modified()).ok()
    }
}

/// One key a line; empty lines and lines that begin with # are skipped.
fn read_keys(path: &Path) -> Result<Vec<String>, String> {
    let text = fs::read_to_string(path).map_err(|error| {
        format!(
            "The file {} cannot be read ({error}); name a text file that this user may read.",
            path.display()
        )
    })?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let keys: Vec<String> = lines.map(str::to_owned).collect();
    if keys.is_empty() {
        return Err(format!("The API key file {} holds no key; write one a line.", path.display()));
    }
    // The line is counted, not shown: it may be a real key with a typing error.
    if let Some(index) = keys.iter().position(|key| !key.bytes().all(|byte| byte.is_ascii_graphic())) {
        return Err(format!(
            "Key {} in {} cannot be sent in an HTTP header; use letters, digits and punctuation without spaces.",
            index + 1,
            path.display()
        ));
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn write(file: &tempfile::NamedTempFile, text: &str) {
        fs::File::create(file.path()).unwrap().write_all(text.as_bytes()).unwrap();
    }

    #[test]
    fn keys_are_read_again_and_a_broken_file_changes_nothing() {
        let file = tempfile::NamedTempFile::new().unwrap();
        write(&file, "# team a\nkey-1\n\n  key-2  \n");
        let keyring = Keyring::from_file(file.path()).unwrap();
        assert!(keyring.identify(b"key-1").is_some() && keyring.identify(b"key-2").is_some());
        assert!(keyring.identify(b"key-3").is_none() && keyring.identify(b"").is_none());
        write(&file, "key-3\n");
        assert_eq!(keyring.reload(), Ok(1));
        assert!(keyring.identify(b"key-1").is_none() && keyring.identify(b"key-3").is_some());
        for (broken, hint) in [("# none\n", "holds no key"), ("good\nbad key\n", "Key 2")] {
            write(&file, broken);
            let error = keyring.reload().unwrap_err();
            assert!(error.contains(hint) && !error.contains("bad key"), "{error}");
            assert!(keyring.identify(b"key-3").is_some());
        }
        assert!(!keyring.is_open());
        assert!(Keyring::fixed::<&str>(&[]).is_open());
    }

    #[test]
    fn b79_no_key_and_salt_look_like_another_pair() {
        let keyring = Keyring::fixed(&["a", "b"]);
        let (a, b) = (keyring.identify(b"a"), keyring.identify(b"b"));
        let mut salts = Vec::new();
        for identity in [None, a.as_ref(), b.as_ref()] {
            for salt in [None, Some(""), Some("a"), Some("\u{1}")] {
                salts.push(cache_salt(identity, salt));
            }
        }
        assert_eq!(salts[0], None, "without either, prefixes are shared");
        salts.sort_unstable();
        let count = salts.len();
        salts.dedup();
        assert_eq!(salts.len(), count);
        assert_eq!(cache_salt(a.as_ref(), Some("x")), cache_salt(a.as_ref(), Some("x")));
    }
}
