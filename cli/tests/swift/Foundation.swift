// The declarations of Foundation that exported Swift uses, spelled as its documentation spells them: Foundation itself needs headers
// of the C library. A file contains its path.

public struct URL: Sendable {
    public let path: String

    public init(fileURLWithPath path: String) {
        self.path = path
    }

    public func appendingPathComponent(_ pathComponent: String) -> URL {
        URL(fileURLWithPath: path + "/" + pathComponent)
    }
}

extension String {
    public struct Encoding: Sendable {
        public static let utf8 = Encoding()
    }

    public init(contentsOf url: URL, encoding enc: Encoding) throws {
        self = url.path
    }
}
