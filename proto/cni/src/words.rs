//! Enums each of whose variants is one word in a configuration.

/// Declares an enum, `ALL` of its variants and `as_str`, the word of each, from one table: a
/// variant can be missing in none of them.
#[macro_export]
macro_rules! words {
    (
        $(#[$about:meta])*
        $visible:vis enum $name:ident {
            $($(#[$about_variant:meta])* $variant:ident = $word:literal,)+
        }
    ) => {
        $(#[$about])*
        #[derive(::serde::Deserialize, ::serde::Serialize)]
        $visible enum $name {
            $($(#[$about_variant])* #[serde(rename = $word)] $variant,)+
        }

        impl $name {
            /// All of them, in the order of their declaration.
            $visible const ALL: [$name; [$($word),+].len()] = [$($name::$variant),+];

            /// As written in a configuration.
            $visible const fn as_str(self) -> &'static str {
                match self {
                    $($name::$variant => $word,)+
                }
            }
        }
    };
}
