//! What an operator's `NicClusterPolicy` (`mellanox.com/v1alpha1`) says of device plugins, as values of
//! our chart. The plugins' configurations in it are used as they are: this program reads both.
//!
//! Fields: `api/v1alpha1/nicclusterpolicy_types.go` of NVIDIA's Network Operator.

use serde_json::Value;

use rdma_device_plugin::config::Problems;

/// The kind.
const KIND: &str = "NicClusterPolicy";
/// The version that is read.
const API_VERSION: &str = "mellanox.com/v1alpha1";

/// What the policy asks for.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct FromPolicy {
    /// The configuration, as the operator passes it to the plugin.
    pub config: String,
    /// The field that it is in.
    pub field: &'static str,
    /// Flags of `rdma-device-plugin run`.
    pub arguments: Vec<String>,
    /// Devices are delivered by CDI.
    pub use_cdi: bool,
    /// Keys of the chart that are taken over unchanged: `affinity`, `tolerations`,
    /// `imagePullSecrets`.
    pub values: Vec<(&'static str, Value)>,
    /// What a person has to know or to do.
    pub notes: Vec<String>,
}

/// The plugins whose place this program takes, by their fields.
const PLUGINS: [&str; 2] = ["rdmaSharedDevicePlugin", "sriovDevicePlugin"];

/// Other parts of the policy, and what becomes of them.
const OTHERS: [(&str, &str); 7] = [
    (
        "/spec/ofedDriver",
        "ofedDriver stays the operator's: pools fill when its driver is there; to withhold units until then, mount /run/mellanox/drivers in the daemon and give it --wait-for file:/run/mellanox/drivers/.driver-ready",
    ),
    (
        "/spec/secondaryNetwork/ipamPlugin",
        "secondaryNetwork.ipamPlugin (whereabouts): leases and networks move as docs/migration.md says, then remove it",
    ),
    (
        "/spec/secondaryNetwork/ipoib",
        "secondaryNetwork.ipoib: rdma-netdev makes IPoIB children (attach: ipoib); once the networks say so, remove it",
    ),
    (
        "/spec/secondaryNetwork/multus",
        "secondaryNetwork.multus stays: Multus calls rdma-netdev",
    ),
    (
        "/spec/nvIpam",
        "nvIpam stays usable: list its type in the policy's allow.ipam, or move the networks to rdma-ipam",
    ),
    (
        "/spec/ibKubernetes",
        "ibKubernetes stays the operator's: partition keys and GUIDs are not set here",
    ),
    (
        "/spec/nicFeatureDiscovery",
        "nicFeatureDiscovery stays the operator's",
    ),
];

/// Reads a policy, as `kubectl get nicclusterpolicies -o yaml` prints it, or a manifest.
///
/// # Errors
/// It is no such policy, or has no device plugin, or both.
pub(crate) fn read(text: &str) -> Result<FromPolicy, Problems> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(text).map_err(|error| {
        Problems::one(format!(
            "neither YAML nor JSON: {}",
            error.without_snippet()
        ))
    })?;
    let items = documents
        .iter()
        .flat_map(|document| match document["items"].as_array() {
            Some(items) => items.iter().collect(),
            None => vec![document],
        });
    let policies: Vec<&Value> = items.filter(|item| item["kind"] == KIND).collect();
    let [policy] = policies.as_slice() else {
        return Err(Problems::one(match policies.len() {
            0 => format!("there is no {KIND}"),
            several => format!("there are {several} objects of kind {KIND}; the operator uses one"),
        }));
    };
    if policy["apiVersion"] != API_VERSION {
        return Err(Problems::one(format!(
            "apiVersion is {}; this program reads {API_VERSION}",
            policy["apiVersion"]
        )));
    }
    of_policy(policy)
}

fn of_policy(policy: &Value) -> Result<FromPolicy, Problems> {
    let spec = &policy["spec"];
    let present = PLUGINS
        .into_iter()
        .filter(|field| spec.get(*field).is_some_and(Value::is_object));
    let field = match present.collect::<Vec<_>>().as_slice() {
        [field] => *field,
        [] => {
            return Err(Problems::one(
                "spec has neither rdmaSharedDevicePlugin nor sriovDevicePlugin: there is nothing to take over",
            ));
        }
        _ => {
            return Err(Problems::one(
                "spec has both rdmaSharedDevicePlugin and sriovDevicePlugin, and one daemon reads one file: \
                 write a file of version 1 with a shared pool for each entry of configList and an \
                 exclusive pool for each of resourceList (docs/pools.md)",
            ));
        }
    };
    let plugin = spec.get(field).unwrap_or(&Value::Null);
    let Some(config) = plugin["config"]
        .as_str()
        .filter(|text| !text.trim().is_empty())
    else {
        return Err(Problems::one(format!(
            "spec.{field}.config is missing: without it the operator's plugin offers nothing"
        )));
    };
    let use_cdi = plugin["useCdi"] == true;
    let mut arguments = Vec::new();
    arguments.extend(use_cdi.then(|| "--use-cdi".to_owned()));
    let mut values = Vec::new();
    if spec["nodeAffinity"].is_object() {
        values.push((
            "affinity",
            serde_json::json!({"nodeAffinity": spec["nodeAffinity"]}),
        ));
    }
    if spec["tolerations"].is_array() {
        values.push(("tolerations", spec["tolerations"].clone()));
    }
    let secrets = plugin["imagePullSecrets"].as_array().into_iter().flatten();
    let secrets: Vec<Value> = secrets
        .map(|name| serde_json::json!({"name": name}))
        .collect();
    if !secrets.is_empty() {
        values.push(("imagePullSecrets", Value::Array(secrets)));
    }
    let mut notes = vec![format!(
        "remove spec.{field} from the {KIND} before this chart is installed: two plugins cannot \
         register one resource"
    )];
    let others = OTHERS
        .iter()
        .filter(|(pointer, _)| policy.pointer(pointer).is_some_and(|v| !v.is_null()));
    notes.extend(others.map(|(_, note)| (*note).to_owned()));
    Ok(FromPolicy {
        config: config.to_owned(),
        field,
        arguments,
        use_cdi,
        values,
        notes,
    })
}

impl FromPolicy {
    /// The values as a file for `helm install --values`.
    pub(crate) fn values_file(&self) -> String {
        let mut text = String::from("config: |\n");
        for line in self.config.trim_matches('\n').lines() {
            text += format!("  {line}").trim_end();
            text.push('\n');
        }
        if self.use_cdi {
            text += "cdi: {enabled: true}\n";
        }
        if !self.arguments.is_empty() {
            text += &format!("extraArgs: {}\n", serde_json::json!(self.arguments));
        }
        for (key, value) in &self.values {
            // JSON is YAML.
            text += &format!("{key}: {value}\n");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: &str = r#"
apiVersion: mellanox.com/v1alpha1
kind: NicClusterPolicy
metadata: {name: nic-cluster-policy}
spec:
  ofedDriver: {image: doca-driver}
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: []}
  tolerations: [{key: nvidia.com/gpu, operator: Exists}]
  rdmaSharedDevicePlugin:
    image: k8s-rdma-shared-dev-plugin
    imagePullSecrets: [ngc]
    useCdi: true
    config: |
      {"configList": [{"resourceName": "a", "rdmaHcaMax": 63, "selectors": {"ifNames": ["ens1f0"]}}]}
  secondaryNetwork:
    multus: {image: multus-cni}
    ipamPlugin: {image: whereabouts}
"#;

    #[test]
    fn the_plugins_configuration_is_taken_over_unchanged() {
        let from = read(POLICY).unwrap();
        let config = rdma_device_plugin::config::parse(&from.config).unwrap();
        assert_eq!(config.pools[0].resource.as_str(), "rdma/a");
        assert_eq!(from.arguments, ["--use-cdi"]);
        assert_eq!(from.notes.len(), 4, "{:?}", from.notes);
        let values: Value = serde_saphyr::from_str(&from.values_file()).unwrap();
        assert_eq!(
            values["config"].as_str().unwrap().trim(),
            from.config.trim()
        );
        assert_eq!(values["tolerations"][0]["key"], "nvidia.com/gpu");
        assert_eq!(values["imagePullSecrets"][0]["name"], "ngc");
        assert_eq!(values["cdi"]["enabled"], true);
        assert!(values["affinity"]["nodeAffinity"].is_object());
    }

    #[test]
    fn what_cannot_be_taken_over_is_refused_by_name() {
        let both = POLICY.replace(
            "  secondaryNetwork:",
            "  sriovDevicePlugin: {config: '{}'}\n  secondaryNetwork:",
        );
        let none = POLICY.replace("rdmaSharedDevicePlugin", "other");
        let empty = POLICY.replace("    config: |\n", "    configs: |\n");
        let newer = POLICY.replace("v1alpha1", "v2");
        for (text, expected) in [
            (
                both.as_str(),
                "both rdmaSharedDevicePlugin and sriovDevicePlugin",
            ),
            (&none, "nothing to take over"),
            (&empty, "spec.rdmaSharedDevicePlugin.config is missing"),
            (&newer, "this program reads mellanox.com/v1alpha1"),
            ("kind: Pod\n", "there is no NicClusterPolicy"),
            ("a: [", "neither YAML nor JSON"),
        ] {
            let problems = read(text).unwrap_err();
            assert!(
                problems.to_string().contains(expected),
                "{expected}: {problems}"
            );
        }
    }

    #[test]
    fn a_list_of_kubectl_is_read() {
        let body = POLICY.trim().replace('\n', "\n  ");
        let list = format!("kind: List\nitems:\n- {body}\n");
        assert_eq!(read(&list).unwrap().field, "rdmaSharedDevicePlugin");
    }
}
