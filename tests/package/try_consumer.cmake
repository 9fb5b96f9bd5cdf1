# Builds and runs consumer/ with the library found in one of two ways; see CMakeLists.txt for the variables.
file(REMOVE_RECURSE ${work_dir})
set(configure ${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR}/consumer -B ${work_dir}/build -G ${generator}
              -D CMAKE_CXX_COMPILER_LAUNCHER=${compiler_launcher}
              # As the build under test, so that ccache has the library's objects already.
              -D CMAKE_BUILD_TYPE=${build_type} -D FLASHOVERLAP_WERROR=${werror})

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "failed with ${result}: ${command}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

if(way STREQUAL "find_package")
  run(${CMAKE_COMMAND} --install ${build_dir} --prefix ${work_dir}/prefix)
  run(${configure} -D CMAKE_PREFIX_PATH=${work_dir}/prefix)
  # Nothing of the build tree may be left in what was installed.
  file(GLOB_RECURSE package_files ${work_dir}/prefix/*.cmake)
  foreach(file IN LISTS package_files)
    file(READ ${file} text)
    string(FIND "${text}" "${build_dir}/" place)
    if(NOT place EQUAL -1)
      message(FATAL_ERROR "${file} names the build folder ${build_dir}")
    endif()
  endforeach()
  run(${work_dir}/prefix/bin/flashoverlap --version)
else()
  run(${configure} -D FLASHOVERLAP_SOURCE_DIR=${source_dir})
endif()
run(${CMAKE_COMMAND} --build ${work_dir}/build)
run(${work_dir}/build/consumer)
message("${output}")
