// The declarations of Apple's framework Metal that exported Swift uses, as its documentation spells them: for checking types where
// the framework is absent. Nothing here runs.

public struct MTLSize: Sendable {
    public var width: Int
    public var height: Int
    public var depth: Int
    public init(width: Int, height: Int, depth: Int) { fatalError() }
}

public enum MTLDataType: UInt, Sendable {
    case none, float, half, int, uint, short, ushort, char, uchar, bool, long, ulong, bfloat
}

public enum MTLLanguageVersion: UInt, Sendable {
    case version2_4, version3_0, version3_1
}

public enum MTLMathMode: Int, Sendable {
    case safe, relaxed, fast
}

open class MTLCompileOptions {
    public init() { fatalError() }
    open var languageVersion: MTLLanguageVersion {
        get { fatalError() }
        set { fatalError() }
    }
    open var mathMode: MTLMathMode {
        get { fatalError() }
        set { fatalError() }
    }
    open var fastMathEnabled: Bool {
        get { fatalError() }
        set { fatalError() }
    }
}

open class MTLFunctionConstantValues {
    public init() { fatalError() }
    open func setConstantValue(_ value: UnsafeRawPointer, type: MTLDataType, index: Int) { fatalError() }
}

public protocol MTLBuffer: AnyObject {
    var length: Int { get }
}

public protocol MTLFunction: AnyObject {
    var name: String { get }
}

public protocol MTLLibrary: AnyObject {
    func makeFunction(name: String, constantValues: MTLFunctionConstantValues) throws -> any MTLFunction
}

public protocol MTLComputePipelineState: AnyObject {
    var maxTotalThreadsPerThreadgroup: Int { get }
    var threadExecutionWidth: Int { get }
}

public protocol MTLDevice: AnyObject {
    var maxThreadgroupMemoryLength: Int { get }
    func makeLibrary(source: String, options: MTLCompileOptions?) throws -> any MTLLibrary
    func makeComputePipelineState(function: any MTLFunction) throws -> any MTLComputePipelineState
    func makeCommandQueue() -> (any MTLCommandQueue)?
    func makeBuffer(length: Int, options: MTLResourceOptions) -> (any MTLBuffer)?
}

public struct MTLResourceOptions: OptionSet, Sendable {
    public let rawValue: UInt
    public init(rawValue: UInt) { fatalError() }
    public static var storageModeShared: MTLResourceOptions { fatalError() }
}

public protocol MTLCommandQueue: AnyObject {
    func makeCommandBuffer() -> (any MTLCommandBuffer)?
}

public protocol MTLCommandBuffer: AnyObject {
    var error: (any Error)? { get }
    func makeComputeCommandEncoder() -> (any MTLComputeCommandEncoder)?
    func commit()
    func waitUntilCompleted()
}

public protocol MTLComputeCommandEncoder: AnyObject {
    func setComputePipelineState(_ state: any MTLComputePipelineState)
    func setBuffer(_ buffer: (any MTLBuffer)?, offset: Int, index: Int)
    func setBytes(_ bytes: UnsafeRawPointer, length: Int, index: Int)
    func dispatchThreadgroups(_ threadgroupsPerGrid: MTLSize, threadsPerThreadgroup: MTLSize)
    func endEncoding()
}

public func MTLCreateSystemDefaultDevice() -> (any MTLDevice)? { fatalError() }
