//! Configuration: three formats, one model.
//!
//! The format is known by its top-level key: `configList` is the RDMA shared device plugin's file,
//! `resourceList` the SR-IOV network device plugin's, and `version` our own. The first two are
//! read as their Go programs read them; ours is strict.

pub mod flags;
pub mod model;
pub mod native;
mod problems;
pub mod range;
pub mod resource;
pub mod rsdp;
pub mod selector;
pub mod sriov;
mod value;

use std::io::Read as _;
use std::path::Path;

use node::json;

pub use flags::Defaults;
pub use model::{
    Config, Damping, Delivery, Exclude, Format, Gate, Late, MAX_POOLED_UNITS, MAX_UNITS, NodeClass,
    NodeRule, Policy, PoolConfig, PortHealth, Sharing, TopologyConfig, Variables,
};
pub use problems::Problems;
pub use resource::ResourceName;

/// Largest configuration file that is read; a ConfigMap holds at most 1 MiB.
const MAX_BYTES: u64 = 1024 * 1024;

/// Reads and checks a configuration file.
///
/// # Errors
/// It cannot be read, or is wrong.
pub fn load(path: &Path, defaults: &Defaults) -> anyhow::Result<Config> {
    check(path, &text(path)?, defaults)
}

/// Reads a configuration file.
///
/// # Errors
/// It cannot be read, or is larger than any ConfigMap.
pub fn text(path: &Path) -> anyhow::Result<String> {
    let read = || {
        let (file, meta) = node::file::open_regular(path)?;
        let bytes = meta.len();
        anyhow::ensure!(
            bytes <= MAX_BYTES,
            "{bytes} bytes, at most {MAX_BYTES} are read"
        );
        let mut text = String::new();
        file.take(MAX_BYTES).read_to_string(&mut text)?;
        Ok(text)
    };
    read().map_err(|error| anyhow::anyhow!("read configuration {}: {error}", path.display()))
}

/// Checks the text of the configuration file at `path`.
///
/// # Errors
/// All that is wrong with it.
pub fn check(path: &Path, text: &str, defaults: &Defaults) -> anyhow::Result<Config> {
    parse_with(text, defaults)
        .map_err(|problems| anyhow::anyhow!("configuration {}: {problems}", path.display()))
}

impl Default for Defaults {
    fn default() -> Self {
        Self {
            resource_prefix: sriov::DEFAULT_PREFIX.into(),
            use_cdi: false,
            wait_for: Vec::new(),
        }
    }
}

/// Checks the text of a configuration.
///
/// # Errors
/// [`Problems`]: all that is wrong with it.
pub fn parse(text: &str) -> Result<Config, Problems> {
    parse_with(text, &Defaults::default())
}

/// Checks the text of a configuration under what the command line says.
///
/// # Errors
/// [`Problems`]: all that is wrong with it.
pub fn parse_with(text: &str, defaults: &Defaults) -> Result<Config, Problems> {
    let mut config = match format_of(text)? {
        (Format::Rsdp, Some(document)) => rsdp::read(&document),
        (Format::Sriov, Some(document)) => sriov::read(&document, &defaults.resource_prefix),
        _ => native::read(text),
    }?;
    for pool in &mut config.pools {
        if defaults.use_cdi && config.format != Format::Native {
            pool.delivery = Delivery::Cdi;
        }
        if pool.wait_for.is_empty() {
            pool.wait_for.clone_from(&defaults.wait_for);
        }
    }
    Ok(config)
}

/// Recognises the format by its top-level key. Go folds key case, so this does too.
fn format_of(text: &str) -> Result<(Format, Option<json::Value>), Problems> {
    let document = match json::parse(text) {
        Ok(document) => document,
        // Our own format may be YAML. What is neither gets the YAML reader's message, which has
        // line, column and the offending text, unless it was plainly meant as JSON of a peer.
        Err(error) => {
            let mut lists = ["configList", "resourceList"].iter();
            let of_peer = lists.any(|key| text.contains(key));
            return match text.trim_start().starts_with('{') && of_peer {
                true => Err(Problems::one(error)),
                false => Ok((Format::Native, None)),
            };
        }
    };
    let fields = document.fields();
    let has = |key: &str| {
        fields
            .iter()
            .any(|(name, _)| name.eq_ignore_ascii_case(key))
    };
    match (has("configList"), has("resourceList"), has("version")) {
        (true, true, _) => Err(Problems::one(
            "both configList and resourceList are present; give each plugin's list its own file",
        )),
        (true, false, false) => Ok((Format::Rsdp, Some(document))),
        (false, true, false) => Ok((Format::Sriov, Some(document))),
        (false, false, true) => Ok((Format::Native, None)),
        (_, _, true) => Err(Problems::one(
            "version is present together with a peer's list; write pools under \"pools\", or leave \
             out version",
        )),
        (false, false, false) => Err(Problems::one(
            "no configList, resourceList or version at the top level, so the format is unknown; \
             our own begins with version: 1",
        )),
    }
}
