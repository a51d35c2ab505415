//! `NetworkAttachmentDefinition`s, read from the manifests an administrator would apply.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

const KIND: &str = "NetworkAttachmentDefinition";

/// One definition.
#[derive(Debug)]
pub(super) struct Definition {
    object: Value,
    name: String,
}

/// Those there are, by namespace and name.
#[derive(Debug)]
pub(super) struct Definitions {
    found: BTreeMap<(String, String), Definition>,
    sources: Vec<PathBuf>,
}

impl Definitions {
    /// Reads every YAML file among `sources` and in the directories among them.
    pub(super) fn read(sources: &[PathBuf]) -> Result<Self> {
        let mut found = BTreeMap::new();
        for source in sources {
            for file in files(source).with_context(|| format!("read {}", source.display()))? {
                let text = fs::read_to_string(&file)
                    .with_context(|| format!("read {}", file.display()))?;
                let objects: Vec<Value> = serde_saphyr::from_multiple(&text)
                    .with_context(|| format!("read {}", file.display()))?;
                for object in objects {
                    if object.get("kind").and_then(Value::as_str) != Some(KIND) {
                        continue;
                    }
                    let text = |path: &str| object.pointer(path).and_then(Value::as_str);
                    let namespace = text("/metadata/namespace").unwrap_or("default").to_owned();
                    let name = text("/metadata/name")
                        .with_context(|| format!("{}: a {KIND} without a name", file.display()))?
                        .to_owned();
                    let key = (namespace, name.clone());
                    if found
                        .insert(
                            key,
                            Definition {
                                object,
                                name: name.clone(),
                            },
                        )
                        .is_some()
                    {
                        bail!("{}: there is another {KIND} {name}", file.display());
                    }
                }
            }
        }
        Ok(Self {
            found,
            sources: sources.to_vec(),
        })
    }

    pub(super) fn get(&self, namespace: &str, name: &str) -> Result<&Definition> {
        let key = (namespace.to_owned(), name.to_owned());
        self.found.get(&key).with_context(|| {
            format!(
                "cannot find a {KIND} ({name}) in namespace ({namespace}) among {:?}",
                self.sources
            )
        })
    }
}

fn files(source: &Path) -> std::io::Result<Vec<PathBuf>> {
    if source.is_file() {
        return Ok(vec![source.to_path_buf()]);
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(source)? {
        let path = entry?.path();
        let yaml = path
            .extension()
            .is_some_and(|ext| ext == "yaml" || ext == "yml");
        if yaml && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

impl Definition {
    /// The resource whose device the network is to have.
    pub(super) fn resource_name(&self) -> Option<&str> {
        let annotation = "/metadata/annotations/k8s.v1.cni.cncf.io~1resourceName";
        self.object.pointer(annotation).and_then(Value::as_str)
    }

    /// Its CNI configuration as a list of plugins, named after the definition unless it has a name.
    pub(super) fn conflist(&self) -> Result<Value> {
        let config = self.object.pointer("/spec/config").and_then(Value::as_str);
        let config = config.with_context(|| format!("{KIND} {} has no spec.config", self.name))?;
        let config: Value = serde_json::from_str(config)
            .with_context(|| format!("{KIND} {}: failed to unmarshal Spec.Config", self.name))?;
        as_list(config, &self.name)
    }
}

/// A single plugin's configuration as a list of one; a list as it is.
pub(super) fn as_list(mut config: Value, default_name: &str) -> Result<Value> {
    let Some(keys) = config.as_object_mut() else {
        bail!("{default_name}: not a JSON object")
    };
    if keys
        .get("name")
        .and_then(Value::as_str)
        .unwrap_or_default()
        .is_empty()
    {
        keys.insert("name".to_owned(), json!(default_name));
    }
    if keys.contains_key("plugins") {
        return Ok(config);
    }
    if !keys.contains_key("type") {
        bail!("{default_name}: neither 'type' nor 'plugins'");
    }
    let name = keys.get("name").cloned();
    let version = keys
        .get("cniVersion")
        .cloned()
        .unwrap_or_else(|| json!("0.1.0"));
    Ok(json!({ "cniVersion": version, "name": name, "plugins": [config] }))
}
