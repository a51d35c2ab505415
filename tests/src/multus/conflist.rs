//! What libcni does with a list of plugins: one configuration built for each,
//! the result of one given to the next, and kept for DEL.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};

use crate::cni::Call as PluginCall;

/// One attachment, as a runtime knows it.
#[derive(Debug)]
pub(super) struct Runtime {
    pub(super) container_id: String,
    pub(super) netns: String,
    pub(super) ifname: String,
    /// `CNI_ARGS`.
    pub(super) args: String,
    /// `CNI_PATH`.
    pub(super) path: Vec<PathBuf>,
    pub(super) capability_args: Map<String, Value>,
    /// Directory of results.
    pub(super) cache: PathBuf,
}

/// ADD of every plugin in order; the last one's result, which is also kept.
pub(super) fn add(list: &Value, runtime: &Runtime) -> Result<Value> {
    let mut previous = None;
    for plugin in plugins(list)? {
        let config = build(list, plugin, previous.as_ref(), runtime);
        let result = call("ADD", plugin, &config, runtime)?;
        previous = Some(result);
    }
    let result = previous.context("the list has no plugin")?;
    let cached = json!({
        "kind": "cniCacheV1",
        "containerId": runtime.container_id,
        "ifName": runtime.ifname,
        "networkName": list.get("name"),
        "cniArgs": runtime.args,
        "capabilityArgs": runtime.capability_args,
        "config": list,
        "result": result,
    });
    let path = cache_path(list, runtime);
    fs::create_dir_all(&runtime.cache)
        .and_then(|()| fs::write(&path, cached.to_string()))
        .with_context(|| format!("keep the result in {}", path.display()))?;
    Ok(result)
}

/// DEL of every plugin in reverse, with the result that ADD left, up to the first that fails.
pub(super) fn del(list: &Value, runtime: &Runtime) -> Result<()> {
    let path = cache_path(list, runtime);
    let previous = if at_least(list, 4) {
        let cached = fs::read(&path).ok();
        let cached = cached.and_then(|text| serde_json::from_slice::<Value>(&text).ok());
        cached.and_then(|cached| cached.get("result").cloned())
    } else {
        None
    };
    for plugin in plugins(list)?.iter().rev() {
        let config = build(list, plugin, previous.as_ref(), runtime);
        call("DEL", plugin, &config, runtime)?;
    }
    let _ = fs::remove_file(path);
    Ok(())
}

/// STATUS or GC of every plugin; both came with CNI 1.1.0.
pub(super) fn without_attachment(
    command: &str,
    list: &Value,
    runtime: &Runtime,
    valid_attachments: Option<Value>,
) -> Result<()> {
    let version = list
        .get("cniVersion")
        .and_then(Value::as_str)
        .unwrap_or_default();
    if !version.starts_with("1.") || version == "1.0.0" {
        return Ok(());
    }
    for plugin in plugins(list)? {
        let mut config = build(list, plugin, None, runtime);
        if let (Some(keys), Some(valid)) = (config.as_object_mut(), &valid_attachments) {
            keys.insert("cni.dev/valid-attachments".to_owned(), valid.clone());
        }
        call(command, plugin, &config, runtime)?;
    }
    Ok(())
}

/// The plugin's own keys, with the list's name and version, the result so far,
/// and those capability arguments it says it can use.
fn build(list: &Value, plugin: &Value, previous: Option<&Value>, runtime: &Runtime) -> Value {
    let mut config = plugin.as_object().cloned().unwrap_or_default();
    for key in ["name", "cniVersion"] {
        if let Some(value) = list.get(key) {
            config.insert(key.to_owned(), value.clone());
        }
    }
    if let Some(previous) = previous {
        config.insert("prevResult".to_owned(), previous.clone());
    }
    let capabilities = plugin.get("capabilities").and_then(Value::as_object);
    let able = |key: &&String| {
        let capability = capabilities.and_then(|capabilities| capabilities.get(*key));
        capability.and_then(Value::as_bool).unwrap_or_default()
    };
    let usable: Map<_, _> = runtime
        .capability_args
        .iter()
        .filter(|(key, _)| able(key))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect();
    if !usable.is_empty() {
        config.insert("runtimeConfig".to_owned(), Value::Object(usable));
    }
    Value::Object(config)
}

fn call(command: &str, plugin: &Value, config: &Value, runtime: &Runtime) -> Result<Value> {
    let kind = plugin
        .get("type")
        .and_then(Value::as_str)
        .context("a plugin without a type")?;
    let mut found = runtime.path.iter().map(|directory| directory.join(kind));
    let Some(executable) = found.find(|path| path.is_file()) else {
        bail!("failed to find plugin {kind:?} in path {:?}", runtime.path);
    };
    let call = PluginCall {
        plugin: executable,
        container_id: runtime.container_id.clone(),
        netns: PathBuf::from(&runtime.netns),
        ifname: runtime.ifname.clone(),
        path: std::env::join_paths(&runtime.path)?,
        args: runtime.args.clone(),
        host: None,
        // A runtime passes its own environment on.
        envs: std::env::vars_os()
            .filter(|(name, _)| !name.to_string_lossy().starts_with("CNI_"))
            .collect(),
    };
    let answer = call.run(command, config.to_string().as_bytes())?;
    if answer.status.success() {
        return answer.success();
    }
    match answer.refusal() {
        Ok((code, message)) => {
            bail!("plugin type={kind:?} failed ({command}): {message} (code {code})")
        }
        Err(error) => Err(error.context(format!("plugin type={kind:?} failed ({command})"))),
    }
}

fn plugins(list: &Value) -> Result<&Vec<Value>> {
    let plugins = list.get("plugins").and_then(Value::as_array);
    plugins
        .filter(|plugins| !plugins.is_empty())
        .context("the list has no plugin")
}

/// True for list versions 0.`minor`.0 and later.
fn at_least(list: &Value, minor: u32) -> bool {
    let version = list
        .get("cniVersion")
        .and_then(Value::as_str)
        .unwrap_or("0.1.0");
    let mut parts = version.split('.').map(|part| part.parse().unwrap_or(0_u32));
    (parts.next(), parts.next()) >= (Some(0), Some(minor))
}

fn cache_path(list: &Value, runtime: &Runtime) -> PathBuf {
    let network = list.get("name").and_then(Value::as_str).unwrap_or_default();
    runtime.cache.join(format!(
        "{network}-{}-{}",
        runtime.container_id, runtime.ifname
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runtime() -> Runtime {
        let capability_args = json!({"deviceID": "0000:3b:00.0", "mac": "02:00:00:00:00:01"});
        Runtime {
            container_id: "c".to_owned(),
            netns: String::new(),
            ifname: "net1".to_owned(),
            args: String::new(),
            path: Vec::new(),
            capability_args: capability_args.as_object().cloned().unwrap(),
            cache: PathBuf::new(),
        }
    }

    #[test]
    fn a_plugin_gets_the_capability_arguments_it_can_use() {
        let plugin = json!({"type": "x", "capabilities": {"deviceID": true, "mac": false}});
        let list = json!({"cniVersion": "1.0.0", "name": "net", "plugins": [plugin]});
        let config = build(&list, &plugin, None, &runtime());
        assert_eq!(config["runtimeConfig"], json!({"deviceID": "0000:3b:00.0"}));
        assert_eq!(config["name"], "net");
        assert_eq!(config["cniVersion"], "1.0.0");
        assert!(config.get("prevResult").is_none());

        let unable = build(
            &list,
            &json!({"type": "x"}),
            Some(&json!({"ips": []})),
            &runtime(),
        );
        assert!(unable.get("runtimeConfig").is_none());
        assert_eq!(unable["prevResult"], json!({"ips": []}));
    }

    #[test]
    fn del_of_old_versions_knows_no_previous_result() {
        for (version, has) in [
            ("0.3.1", false),
            ("0.4.0", true),
            ("1.0.0", true),
            ("1.1.0", true),
        ] {
            assert_eq!(
                at_least(&json!({"cniVersion": version}), 4),
                has,
                "{version}"
            );
        }
        assert!(!at_least(&json!({}), 4));
    }
}
