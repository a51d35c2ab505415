//! Releases of the kernel, and the oldest that serves.

/// The oldest kernel this plugin works with: since 5.14 a link names the hardware below it
/// (`IFLA_PARENT_DEV_NAME`, `include/uapi/linux/if_link.h`), by which a NIC is known again after its
/// pod renamed it or changed its address.
pub const MINIMUM: (u32, u32) = (5, 14);

/// Whether a release, such as `6.1.0-23-amd64`, is older than [`MINIMUM`]; one of another form is not.
#[must_use]
pub fn is_too_old(release: &str) -> bool {
    let numbers = release.split(|c: char| !c.is_ascii_digit());
    let mut numbers = numbers.map_while(|number| number.parse().ok());
    let version = numbers.next().zip(numbers.next());
    version.is_some_and(|version| version < MINIMUM)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_before_5_14_are_too_old() {
        for (release, old) in [
            ("4.18.0-553.el8_10.x86_64", true),
            ("5.3.0", true),
            ("5.4.0-190-generic", true),
            ("5.13.19-2-pve", true),
            ("5.14.0-427.el9.x86_64", false),
            ("5.14", false),
            ("5.14-rc1", false),
            ("6.1.0-23-amd64", false),
            ("10.0.1", false),
            ("5.140.0", false),
            ("unreleased", false),
            ("", false),
        ] {
            assert_eq!(is_too_old(release), old, "{release}");
        }
    }
}
