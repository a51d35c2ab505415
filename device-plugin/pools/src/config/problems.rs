//! What is wrong with a configuration.

use std::fmt;
use std::time::Duration;

use hca::unit::PoolTag;
use node::json::{self, Value};
use serde::de::DeserializeOwned;

use super::model::{Config, Damping, Format, PoolConfig, TopologyConfig};
use super::resource::ResourceName;

/// Everything that is wrong with one configuration, so that a person sees all of it at once.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Problems {
    pub(super) problems: Vec<String>,
    /// What would be warned of if there were no problem.
    pub warnings: Vec<String>,
}

impl fmt::Display for Problems {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.problems.join("; "))
    }
}

impl Problems {
    /// One problem.
    pub fn one(problem: impl ToString) -> Self {
        Self {
            problems: vec![problem.to_string()],
            ..Self::default()
        }
    }

    /// The problems, one message each.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.problems.iter().map(String::as_str)
    }

    pub(super) fn problem(&mut self, message: impl ToString) {
        self.problems.push(message.to_string());
    }

    pub(super) fn warn(&mut self, message: impl ToString) {
        self.warnings.push(message.to_string());
    }

    /// Keeps a good value; notes a problem and keeps nothing of a bad one.
    pub(super) fn keep<T, E: ToString>(&mut self, result: Result<T, E>) -> Option<T> {
        result.map_err(|error| self.problem(error)).ok()
    }

    /// An entry of a peer's file.
    pub(super) fn decode<T: DeserializeOwned>(&mut self, value: &Value, path: &str) -> Option<T> {
        let decoded = json::decode(value, path, &mut self.warnings);
        self.keep(decoded)
    }

    /// The name of a resource in a peer's file, which allows letters, digits and what is in `also`.
    pub(super) fn resource(
        &mut self,
        path: &str,
        (own, usual): (&str, &str),
        name: &str,
        also: &str,
    ) -> Option<ResourceName> {
        let prefix = if own.is_empty() { usual } else { own };
        let resource = ResourceName::of_peer(prefix, name, also);
        self.keep(resource.map_err(|error| format!("{path}: {error}")))
    }

    /// Reads the resources of a list.
    pub(super) fn pools(
        &mut self,
        key: &str,
        list: &[Value],
        read: impl Fn(&Value, &str, &mut Self) -> Option<PoolConfig>,
    ) -> Vec<PoolConfig> {
        if list.is_empty() && self.problems.is_empty() {
            self.problem(format!("{key} is empty; it needs at least one resource"));
        }
        let pool = |(i, value)| read(value, &format!("{key}[{i}]"), self);
        list.iter().enumerate().filter_map(pool).collect()
    }

    /// The configuration, if nothing is wrong with it.
    pub(super) fn conclude(
        mut self,
        format: Format,
        rescan: Option<Duration>,
        pools: Vec<PoolConfig>,
    ) -> Result<Config, Problems> {
        self.problems.extend(name_clashes(&pools));
        if !self.problems.is_empty() {
            return Err(self);
        }
        Ok(Config {
            format,
            rescan,
            damping: Damping::default(),
            pools,
            topology: TopologyConfig::default(),
            warnings: self.warnings,
        })
    }
}

/// One resource name belongs to one pool, and so does the tag that units carry for it.
fn name_clashes(pools: &[PoolConfig]) -> Vec<String> {
    let mut seen = std::collections::HashSet::new();
    let mut tags = std::collections::HashMap::new();
    let mut problems = Vec::new();
    for resource in pools.iter().map(|pool| &pool.resource) {
        if !seen.insert(resource) {
            problems.push(format!(
                "resource {resource} is configured twice; names are unique"
            ));
        } else if let Some(other) = tags.insert(PoolTag::of(resource.as_str()), resource) {
            problems.push(format!(
                "units of {resource} and of {other} would have the same IDs: both names have the \
                 tag {}; give one of them another name",
                PoolTag::of(resource.as_str())
            ));
        }
    }
    problems
}
