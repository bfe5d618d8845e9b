// NixlTransport between two processes: what one sees when the other dies or stops.
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "nixl_transport.h"
#include "transport_contract.h"

namespace kvpush {
namespace {

constexpr std::size_t kMemoryBytes = std::size_t{4} << 20U;

bool happens(const std::function<bool()>& what) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!what()) {
    if (std::chrono::steady_clock::now() > limit) return false;
  }
  return true;
}

void send_all(int socket, const void* data, std::size_t size) {
  ASSERT_EQ(write(socket, data, size), static_cast<ssize_t>(size));
}
bool receive_all(int socket, void* data, std::size_t size) {
  return recv(socket, data, size, MSG_WAITALL) == static_cast<ssize_t>(size);
}
void send_blob(int socket, const Bytes& blob) {
  const std::uint64_t size = blob.size();
  send_all(socket, &size, sizeof size);
  send_all(socket, blob.data(), blob.size());
}
bool receive_blob(int socket, Bytes& blob) {
  std::uint64_t size = 0;
  if (!receive_all(socket, &size, sizeof size)) return false;
  blob.resize(size);
  return receive_all(socket, blob.data(), size);
}

// A transport with memory of its own.
struct Node {
  explicit Node(const std::string& name) {
    NixlTransportOptions options;
    options.agent_name = name + "-" + std::to_string(getpid());
    auto library = NixlLibrary::open(std::getenv("KVPUSH_NIXL_LIBRARY"));
    auto created = NixlTransport::create(library.value(), options);
    transport = std::move(created.value());
    const MemoryRange range{address(), memory.size(), MemoryKind::kHost, 0};
    EXPECT_TRUE(transport->register_memory({&range, 1}).is_ok());
  }
  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(memory.data()); }

  Bytes memory = Bytes(kMemoryBytes);
  std::unique_ptr<NixlTransport> transport;
};

// The other process: this program again, running the test that is disabled below.
class PeerProcess {
 public:
  PeerProcess() {
    int sockets[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
    socket_ = sockets[0];
    process_ = fork();
    if (process_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);  // a stopped peer must not outlive a death test
      close(sockets[0]);
      setenv("KVPUSH_TEST_PEER_SOCKET", std::to_string(sockets[1]).c_str(), 1);
      execl("/proc/self/exe", "peer", "--gtest_filter=NixlPeerProcess.DISABLED_Serve",
            "--gtest_also_run_disabled_tests", "--gtest_brief=1", nullptr);
      _exit(127);
    }
    close(sockets[1]);
  }
  ~PeerProcess() {
    signal(SIGKILL);
    close(socket_);
  }
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  void meet(Node& node) {
    send_blob(socket_, node.transport->local_metadata().value());
    ASSERT_TRUE(receive_blob(socket_, metadata_));
    ASSERT_TRUE(receive_all(socket_, &address_, sizeof address_));
    const auto name = node.transport->add_peer(metadata_);
    ASSERT_TRUE(name.is_ok()) << name.message();
    name_ = name.value();
  }

  void signal(int number) {
    if (process_ <= 0) return;
    kill(process_, number);
    if (number == SIGKILL) {
      waitpid(process_, nullptr, 0);
      process_ = 0;
    }
  }

  const std::string& name() const { return name_; }
  const Bytes& metadata() const { return metadata_; }
  std::uint64_t address() const { return address_; }

 private:
  pid_t process_ = 0;
  int socket_ = -1;
  std::string name_;
  Bytes metadata_;
  std::uint64_t address_ = 0;
};

// Echoes every notification until its parent goes.
TEST(NixlPeerProcess, DISABLED_Serve) {
  const char* const number = std::getenv("KVPUSH_TEST_PEER_SOCKET");
  if (number == nullptr) GTEST_SKIP() << "only for a parent that passes its socket";
  const int socket = std::atoi(number);
  Node node("peer");
  Bytes metadata;
  ASSERT_TRUE(receive_blob(socket, metadata));
  const std::string parent = node.transport->add_peer(metadata).value();
  send_blob(socket, node.transport->local_metadata().value());
  const std::uint64_t address = node.address();
  send_all(socket, &address, sizeof address);
  std::vector<Notification> inbox;
  char byte = 0;
  while (recv(socket, &byte, 1, MSG_DONTWAIT) != 0) {
    ASSERT_TRUE(node.transport->poll_notifications(inbox).is_ok());
    for (const Notification& each : inbox)
      (void)node.transport->notify(parent, each.payload);
    inbox.clear();
  }
}

class NixlProcessTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::getenv("KVPUSH_NIXL_LIBRARY") == nullptr) {
      GTEST_SKIP() << "KVPUSH_NIXL_LIBRARY does not name libnixl_capi.so";
    }
    node_ = std::make_unique<Node>("parent");
  }

  Result<HandleId> write(const PeerProcess& peer, std::string_view payload) {
    const CopyRun run{node_->address(), peer.address(), kMemoryBytes};
    CopyBatch batch;
    batch.runs = {&run, 1};
    return node_->transport->post(CopyDirection::kWrite, peer.name(), batch, to_bytes(payload));
  }

  // How the handle ends, and its release; kInProgress if it does not end.
  HandleState finish(HandleId handle) {
    HandleState state = HandleState::kInProgress;
    std::vector<Notification> inbox;
    const bool ended = happens([&] {
      (void)node_->transport->poll_notifications(inbox);
      state = node_->transport->poll(handle);
      return state != HandleState::kInProgress;
    });
    if (ended) node_->transport->release(handle);
    return state;
  }

  // A handle that cannot end while the peer stands still: its notification fills every buffer.
  HandleId write_to_stopped(const PeerProcess& peer) {
    const auto handle = write(peer, std::string(std::size_t{16} << 20U, 'n'));
    EXPECT_TRUE(handle.is_ok()) << handle.message();
    EXPECT_EQ(node_->transport->poll(handle.value()), HandleState::kInProgress);
    return handle.value();
  }

  void expect_echo(const PeerProcess& peer, std::string_view payload) {
    const auto handle = write(peer, payload);
    ASSERT_TRUE(handle.is_ok()) << handle.message();
    EXPECT_EQ(finish(handle.value()), HandleState::kDone);
    std::vector<Notification> inbox;
    ASSERT_TRUE(happens(
        [&] { return node_->transport->poll_notifications(inbox).is_ok() && !inbox.empty(); }));
    EXPECT_EQ(inbox.front().payload, to_bytes(payload));
  }

  std::unique_ptr<Node> node_;
};

TEST_F(NixlProcessTest, WritesReachAnotherProcess) {
  PeerProcess peer;
  peer.meet(*node_);
  expect_echo(peer, "hello");
}

TEST_F(NixlProcessTest, KilledPeerFailsItsHandlesAndIsForgotten) {
  Transport& transport = *node_->transport;
  {
    PeerProcess peer;
    peer.meet(*node_);
    expect_echo(peer, "alive");
    peer.signal(SIGSTOP);
    std::vector<HandleId> handles;
    for (int i = 0; i < 8; ++i) {
      const auto handle = write(peer, "never read");
      ASSERT_TRUE(handle.is_ok()) << handle.message();
      handles.push_back(handle.value());
    }
    peer.signal(SIGKILL);
    for (const HandleId handle : handles) {
      EXPECT_NE(finish(handle), HandleState::kInProgress) << "a handle never ended";
    }
    // Sooner or later the fabric notices; from then on the peer is unknown.
    EXPECT_TRUE(happens([&] {
      const auto handle = write(peer, "to nobody");
      if (!handle.is_ok()) return true;
      return finish(handle.value()) == HandleState::kFailed;
    }));
    EXPECT_EQ(transport.counts().peers, 0U);
    EXPECT_EQ(transport.counts().handles, 0U);
    EXPECT_FALSE(node_->transport->last_error().empty());
    EXPECT_FALSE(transport.notify(peer.name(), to_bytes("x")).is_ok());
  }
  PeerProcess successor;
  successor.meet(*node_);
  expect_echo(successor, "the next one");
}

TEST_F(NixlProcessTest, RemovedPeerStaysUntilItsHandlesHaveEnded) {
  Transport& transport = *node_->transport;
  PeerProcess peer;
  peer.meet(*node_);
  expect_echo(peer, "alive");
  peer.signal(SIGSTOP);
  const HandleId handle = write_to_stopped(peer);
  EXPECT_TRUE(transport.add_peer(peer.metadata()).is_ok()) << "the same metadata changes nothing";

  transport.remove_peer(peer.name());
  EXPECT_EQ(transport.counts().peers, 1U);
  EXPECT_FALSE(transport.notify(peer.name(), to_bytes("x")).is_ok());
  EXPECT_FALSE(write(peer, "x").is_ok());
  const auto again = transport.add_peer(peer.metadata());
  EXPECT_NE(again.message().find("in flight"), std::string::npos) << again.message();

  peer.signal(SIGCONT);
  EXPECT_EQ(finish(handle), HandleState::kDone);
  EXPECT_EQ(transport.counts().peers, 0U);
  EXPECT_TRUE(transport.add_peer(peer.metadata()).is_ok());
}

using NixlProcessDeathTest = NixlProcessTest;

TEST_F(NixlProcessDeathTest, ReleasingAHandleInFlightIsOurMistake) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  PeerProcess peer;
  peer.meet(*node_);
  expect_echo(peer, "alive");
  peer.signal(SIGSTOP);
  const HandleId handle = write_to_stopped(peer);
  EXPECT_DEATH(node_->transport->release(handle), "releasing a handle in flight");
  peer.signal(SIGKILL);
  EXPECT_EQ(finish(handle), HandleState::kFailed);
}

TEST_F(NixlProcessTest, RemovingAKilledPeerWithHandlesInFlightEndsThem) {
  PeerProcess peer;
  peer.meet(*node_);
  expect_echo(peer, "alive");
  peer.signal(SIGSTOP);
  const HandleId handle = write_to_stopped(peer);
  node_->transport->remove_peer(peer.name());
  peer.signal(SIGKILL);
  EXPECT_EQ(finish(handle), HandleState::kFailed);
  EXPECT_EQ(node_->transport->counts().peers, 0U);
  EXPECT_EQ(node_->transport->counts().handles, 0U);
}

}  // namespace
}  // namespace kvpush
