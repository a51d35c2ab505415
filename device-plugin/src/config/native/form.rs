//! The form of a file: its keys and words as they are written, with their places.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::fmt;

use serde::Deserialize;
use serde::de::{
    DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor,
};
use serde_saphyr::Spanned;

use super::message::message;
use super::select::OneOrMany;
use crate::config::Findings;

/// Most pools whose form is wrong that are reported at once; each costs another reading of the
/// text.
pub(super) const MAX_MALFORMED_POOLS: usize = 20;

/// A file, without the pools that are passed over.
#[derive(Default)]
pub(super) struct File {
    pub(super) rescan_interval: Option<Spanned<String>>,
    pub(super) health: Health,
    pub(super) topology: Topology,
    pub(super) pools: Vec<Pool>,
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "camelCase")]
pub(super) enum FileKey {
    Version,
    RescanInterval,
    Health,
    Topology,
    Pools,
}

/// Reads a file but for some of its pools, and says which pool it is at. The library stops at the
/// first key or word that it does not know, so a pool that has one is passed over in another reading,
/// which finds what is wrong with the next.
#[derive(Clone, Copy)]
pub(super) struct FileBut<'s> {
    pub(super) malformed: &'s BTreeSet<usize>,
    pub(super) at: &'s Cell<Option<usize>>,
}

impl<'de> DeserializeSeed<'de> for FileBut<'_> {
    type Value = File;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<File, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for FileBut<'_> {
    type Value = File;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a configuration")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<File, A::Error> {
        let mut file = File::default();
        let mut pools = None;
        while let Some(key) = map.next_key()? {
            match key {
                FileKey::Version => drop(map.next_value::<IgnoredAny>()?),
                FileKey::RescanInterval => file.rescan_interval = map.next_value()?,
                FileKey::Health => file.health = map.next_value()?,
                FileKey::Topology => file.topology = map.next_value()?,
                FileKey::Pools => pools = Some(map.next_value_seed(PoolsBut(self))?),
            }
        }
        file.pools = pools.ok_or_else(|| A::Error::missing_field("pools"))?;
        Ok(file)
    }
}

pub(super) struct PoolsBut<'s>(FileBut<'s>);

impl<'de> DeserializeSeed<'de> for PoolsBut<'_> {
    type Value = Vec<Pool>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<Pool>, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for PoolsBut<'_> {
    type Value = Vec<Pool>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a list of pools")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<Pool>, A::Error> {
        let Self(FileBut { malformed, at }) = self;
        let mut pools = Vec::new();
        for index in 0.. {
            at.set(Some(index));
            let more = if malformed.contains(&index) {
                seq.next_element::<IgnoredAny>()?.is_some()
            } else {
                let pool = seq.next_element()?;
                let more = pool.is_some();
                pools.extend(pool);
                more
            };
            if !more {
                break;
            }
        }
        at.set(None);
        Ok(pools)
    }
}

/// The file without malformed pools, each of which is a problem; `None` if it cannot be read even
/// so.
pub(super) fn read_file(text: &str, findings: &mut Findings) -> Option<File> {
    let (mut malformed, at) = (BTreeSet::new(), Cell::new(None));
    loop {
        let read = serde_saphyr::with_deserializer_from_str(text, |deserializer| {
            let (malformed, at) = (&malformed, &at);
            FileBut { malformed, at }.deserialize(deserializer)
        });
        match read {
            Ok(file) => return Some(file),
            Err(error) => findings.problem(message(error)),
        }
        let pool = at.take()?;
        if !malformed.insert(pool) || malformed.len() == MAX_MALFORMED_POOLS {
            return None;
        }
    }
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub(super) struct Health {
    pub(super) down_delay: Option<Spanned<String>>,
    pub(super) up_delay: Option<Spanned<String>>,
    pub(super) flaps: Option<Spanned<u32>>,
    pub(super) flap_window: Option<Spanned<String>>,
    pub(super) flap_hold: Option<Spanned<String>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub(super) struct Topology {
    pub(super) nccl_topology: Option<Spanned<String>>,
    pub(super) rails: Vec<Spanned<String>>,
    pub(super) gpu_resources: Vec<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct Pool {
    pub(super) resource: Spanned<String>,
    pub(super) mode: Mode,
    pub(super) binding: Option<Spanned<BindingWord>>,
    pub(super) strict: Option<Spanned<bool>>,
    pub(super) bind_at_start: Option<Spanned<bool>>,
    pub(super) environment: Option<Spanned<bool>>,
    pub(super) slots: Option<Spanned<u32>>,
    pub(super) policy: Option<Spanned<PolicyWord>>,
    pub(super) nodes: Option<Spanned<Nodes>>,
    #[serde(default)]
    pub(super) exclude_topology: bool,
    pub(super) delivery: Option<Spanned<DeliveryWord>>,
    pub(super) exclude: Option<Vec<ExcludeWord>>,
    #[serde(default)]
    pub(super) wait_for: Vec<Spanned<GateWord>>,
    #[serde(default)]
    pub(super) optional: bool,
    #[serde(default)]
    pub(super) link_up: bool,
    pub(super) select: Spanned<OneOrMany>,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(super) enum Mode {
    Shared,
    Exclusive,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(super) enum BindingWord {
    Early,
    Late,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub(super) enum ExcludeWord {
    Uplinks,
    PfsWithVfs,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum GateWord {
    File(String),
    Module(String),
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub(super) enum DeliveryWord {
    DeviceSpecs,
    Cdi,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum PolicyWord {
    AllHcas,
    Spread,
    Pack,
    Numa,
    SameHca,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub(super) struct Nodes {
    pub(super) required: Option<Vec<NodeWord>>,
    pub(super) optional: Vec<NodeWord>,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "snake_case")]
pub(super) enum NodeWord {
    Uverbs,
    RdmaCm,
    Umad,
    Issm,
    Ucm,
}
